"""GGUF metadata as a Hugging Face config, and GGUF tensor names as state-dict names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np

from gym_sdk.errors import ModelError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF architecture to model class. `llama` is Mistral's and SmolLM's too: their graphs are the same."""

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def weight_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _INSIDE:
        raise ModelError(
            f"the GGUF file has a tensor {name}, which has no place in the model",
            hint="the file may be newer than this version of gym-serve; use the model it was made from",
        )
    return f"model.layers.{match[1]}.{_INSIDE[match[2]]}.{match[3]}"


def hugging_face_config(
    metadata: Mapping[str, Any], names: Set[str], rope_factors: np.ndarray | None, path: Path
) -> dict[str, Any]:
    """The `config.json` of a GGUF file with this metadata and these tensor names.

    Raises:
        ModelError: a needed key or tensor is missing, or rotary scaling that cannot be carried over exactly.
    """
    architecture = str(metadata["general.architecture"])

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise ModelError(f"{path} lacks the metadata key {architecture}.{key}", hint="the file is damaged")
        return value

    if get("expert_count", 0):
        raise ModelError(f"{path} is a mixture of experts, which is not converted here", hint="use its source model")
    hidden, heads, layers = int(get("embedding_length")), int(get("attention.head_count")), int(get("block_count"))
    head_dim = int(get("attention.key_length", get("rope.dimension_count", hidden // heads)))
    _check_complete(names, architecture, layers, path)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(get("feed_forward_length")),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(get("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(get("context_length")),
        "rms_norm_eps": _shortest(float(get("attention.layer_norm_rms_epsilon"))),
        "rope_parameters": _rope(metadata, architecture, head_dim, rope_factors, path),
        "tie_word_embeddings": "output.weight" not in names,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }
    if architecture != "qwen2":  # Qwen2 always has them on q, k and v, and never on o
        config["attention_bias"] = "blk.0.attn_q.bias" in names
    if architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in names
    return config


def _check_complete(names: Set[str], architecture: str, layers: int, path: Path) -> None:
    inside = set(_INSIDE) - (set() if architecture == "qwen3" else {"attn_q_norm", "attn_k_norm"})
    needed = {"token_embd.weight", "output_norm.weight"}
    needed |= {f"blk.{layer}.{part}.weight" for layer in range(layers) for part in inside}
    if missing := sorted(needed - names):
        raise ModelError(f"{path} lacks {len(missing)} tensors, such as {missing[0]}", hint="the file is damaged")


def _rope(
    metadata: Mapping[str, Any], architecture: str, head_dim: int, factors: np.ndarray | None, path: Path
) -> dict[str, Any]:
    theta = float(str(metadata.get(f"{architecture}.rope.freq_base", 10000.0)))
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if factors is not None:
        return _llama3_rope(theta, head_dim, factors, path)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = float(str(metadata.get(f"{architecture}.rope.scaling.factor", 1.0)))
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        original = metadata.get(f"{architecture}.rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise ModelError(f"{path} scales its rotary positions by {kind}, which is not converted here")


def _llama3_rope(theta: float, head_dim: int, factors: np.ndarray, path: Path) -> dict[str, Any]:
    """Llama 3's scaling, which a GGUF file holds as one number a frequency rather than as its parameters.

    The released models use two sets of parameters; each is computed and compared.
    """
    for factor in (8.0, 32.0):
        scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling["original_max_position_embeddings"] = 8192
        if np.allclose(llama3_factors(theta, head_dim, scaling), factors, rtol=1e-5):
            return {"rope_type": "llama3", "rope_theta": theta, **scaling}
    raise ModelError(f"{path} has rotary factors that are not Llama 3's", hint="use the model it was made from")


def llama3_factors(theta: float, head_dim: int, scaling: Mapping[str, float]) -> np.ndarray:
    """How much longer each wavelength becomes: 1 if short, `factor` if long, blended between (meta-llama)."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))
