"""What a GGUF file must say of each architecture, and how its weights differ from Hugging Face's.

The `gguf` library has the names of keys and tensors. The conventions beside them are llama.cpp's (its
`convert_hf_to_gguf.py` and graph builders): rotary pairs of Llama are interleaved, Gemma's norms are stored with 1
added, and some numbers are not in the file but in the reader's code. A model for which those differ is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gym_sdk.errors import ModelError
from gym_serve.models.gguf_config import llama3_factors

Metadata = dict[str, Any]
"""Values by key without the architecture's prefix; Python's types decide those of the file."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One GGUF architecture."""

    architecture: str
    """The name in `general.architecture`."""
    is_rotary_interleaved: bool = False
    """Query and key rows are reordered so that the two halves of each rotary pair are neighbours."""
    is_norm_shifted: bool = False
    """1 is added to the weights of norms."""
    norm_key: str = "attention.layer_norm_rms_epsilon"
    check: Callable[[Any], None] = lambda config: None
    """Raises ModelError for a model whose numbers differ from those in the reader's code."""


def family_of(config: Any) -> Family:
    """The family of a transformers configuration.

    Raises:
        ModelError: an architecture that is not exported, or one of its models that readers would compute otherwise.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ModelError(
            f"{config.model_type} is not exported to GGUF", hint=f"exported are {', '.join(sorted(FAMILIES))}"
        )
    family.check(config)
    return family


def metadata_of(config: Any, family: Family) -> Metadata:
    """The architecture's keys."""
    head_dim = head_dim_of(config)
    rope = _main_rope(config)
    window = getattr(config, "sliding_window", None) if _has_windows(config) else None
    found: Metadata = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        family.norm_key: float(getattr(config, "rms_norm_eps", None) or config.layer_norm_eps),
        "rope.dimension_count": int(head_dim * float(rope.get("partial_rotary_factor") or 1.0)),
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    if family.architecture == "llama" and window is not None:
        # Readers have no window in this architecture: up to its length there is no difference.
        found["context_length"] = min(window, config.max_position_embeddings)
    elif window is not None:
        found["attention.sliding_window"] = window
    elif family.architecture == "phi3":
        found["attention.sliding_window"] = 0
    for key, name in (("attn", "attn_logit_softcapping"), ("final", "final_logit_softcapping")):
        if value := getattr(config, name, None):
            found[f"{key}_logit_softcapping"] = float(value)
    return found | _rope_scaling(config, rope)


def rotary_factors(config: Any) -> dict[str, np.ndarray]:
    """Tensors of rotary factors that stand in the file beside the weights, float32 [head_dim / 2]."""
    rope = _main_rope(config)
    if rope.get("rope_type") == "llama3":
        factors = llama3_factors(float(rope["rope_theta"]), head_dim_of(config), rope)
        return {"rope_freqs.weight": factors.astype(np.float32)}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.asarray(rope[f"{kind}_factor"], dtype=np.float32)
            for kind in ("long", "short")
        }
    return {}


def converted(name: str, weight: np.ndarray, config: Any, family: Family) -> np.ndarray:
    """A weight as the file holds it; `name` is Hugging Face's."""
    if family.is_norm_shifted and name.endswith("norm.weight"):
        return weight + 1
    if family.is_rotary_interleaved and (match := re.search(r"\.([qk])_proj\.", name)):
        return _interleaved(weight, config.num_attention_heads if match[1] == "q" else config.num_key_value_heads)
    return weight


def head_dim_of(config: Any) -> int:
    """Numbers a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from [half, 2] to [2, half]: the opposite of `gym_serve.models.gguf.unpermute`."""
    half = weight.shape[0] // num_heads // 2
    pairs = weight.reshape(num_heads, 2, half, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _main_rope(config: Any) -> Mapping[str, Any]:
    """Rotary parameters; those of the full-attention layers where kinds of layers have their own."""
    rope = config.rope_parameters
    return rope.get("full_attention", rope)


def _has_windows(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    return "sliding_attention" in kinds if kinds is not None else True


def _rope_scaling(config: Any, rope: Mapping[str, Any]) -> Metadata:
    kind = rope.get("rope_type", "default")
    if kind in ("default", "llama3"):
        return {}
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": int(original),
        }
    if kind == "longrope":
        original = int(rope["original_max_position_embeddings"])
        scale = config.max_position_embeddings / original
        # Phi-3: queries and keys grow with the stretched context (arXiv 2404.14219, modeling_phi3.py).
        factor = rope.get("attention_factor") or (
            math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1
        )
        return {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": float(factor)}
    raise ModelError(f"rotary scaling of kind {kind} is not exported to GGUF")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ModelError(
            f"{what}: readers of GGUF would compute another model",
            hint="export the merged folder instead (gym export RUN --merge FOLDER)",
        )


def _check_silu(config: Any) -> None:
    _require(config.hidden_act in ("silu", "swish"), f"the activation is {config.hidden_act}")


def _check_llama(config: Any) -> None:
    _check_silu(config)
    _require(not getattr(config, "mlp_bias", False), "the feed-forward layers have biases")


def _check_gemma(config: Any) -> None:
    activation = config.hidden_activation if getattr(config, "hidden_activation", None) else config.hidden_act
    _require(activation in ("gelu_pytorch_tanh", "gelu"), f"the activation is {activation}")


def _check_gemma_windows(period: int) -> Callable[[Any], None]:
    def check(config: Any) -> None:
        _check_gemma(config)
        expected = [
            "full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(len(config.layer_types))
        ]
        _require(list(config.layer_types) == expected, f"full attention is not in one layer of every {period}")
        per_head = config.hidden_size / config.num_attention_heads
        known = (head_dim_of(config), per_head) if config.num_hidden_layers in (46, 62) else (head_dim_of(config),)
        _require(config.query_pre_attn_scalar in known, f"scores are scaled by {config.query_pre_attn_scalar}")
        if period == 6:
            local = config.rope_parameters.get("sliding_attention", {})
            theta = local.get("rope_theta")
            _require(theta == 10000.0, f"windowed layers have the rotary base {theta}, not 10000")

    return check


FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="llama", is_rotary_interleaved=True, check=_check_llama),
    "mistral": Family(architecture="llama", is_rotary_interleaved=True, check=_check_llama),
    "qwen2": Family(architecture="qwen2", check=_check_silu),
    "qwen3": Family(architecture="qwen3", check=_check_silu),
    "gemma": Family(architecture="gemma", is_norm_shifted=True, check=_check_gemma),
    "gemma2": Family(architecture="gemma2", is_norm_shifted=True, check=_check_gemma_windows(2)),
    "gemma3_text": Family(architecture="gemma3", is_norm_shifted=True, check=_check_gemma_windows(6)),
    "phi": Family(architecture="phi2", norm_key="attention.layer_norm_epsilon"),
    "phi3": Family(architecture="phi3", check=_check_silu),
}
"""By transformers' model type."""
