"""The model and the micro-batch that a plan simulates.

A model of 36 equal layers says nothing that one of 4 does not: the layers' pattern is found in the configuration, a
short and a longer model of whole patterns are simulated, and the difference is what one pattern costs.

Legend: T tokens of a micro-batch, N documents in it.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import register_flop_formula
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig

from gym_sdk.errors import ModelError
from gym_trainer.fast.packing import PackedLayout
from gym_trainer.fast.prefixes import Prefix, SharedKeys, whole_documents

_ATTENTION = "gym_simulated"

QUANTIZED_BYTES = {"nf4": 0.5 + 0.0159, "int8": 1.0}
"""Bytes a weight: nf4 with double quantisation keeps 8 bits for each 64 weights and 32 for each 256 of those."""


def layer_pattern(config: PreTrainedConfig) -> int:
    """The smallest number of layers after which their types repeat."""
    text = config.get_text_config()
    types = list(getattr(text, "layer_types", None) or ())
    mlp_types = list(getattr(text, "mlp_layer_types", None) or ())
    num_layers = text.num_hidden_layers
    for period in range(1, num_layers // 2 + 1):
        if all(
            seq[i] == seq[i + period] for seq in (types, mlp_types) for i in range(min(len(seq), num_layers) - period)
        ):
            return period
    return num_layers


def shortened(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """The configuration with fewer layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(text, name, None):
            setattr(text, name, list(getattr(text, name))[:num_layers])
    text.num_hidden_layers = num_layers
    if isinstance(getattr(text, "max_window_layers", None), int):
        text.max_window_layers = min(text.max_window_layers, num_layers)
    return config


def meta_model(config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    """The model without bytes.

    Raises:
        ModelError: transformers knows no causal language model for the configuration.
    """
    AttentionInterface.register(_ATTENTION, _simulated_attention)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            model.set_attn_implementation(_ATTENTION)
            return model
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"no causal language model can be made of this configuration: {str(error).splitlines()[0]}",
            hint="the architecture may need a newer transformers",
        ) from error


def frozen_bytes(config: PreTrainedConfig, dtype: torch.dtype, quantization: str = "none") -> int:
    """Of a model that is only read, such as a teacher: its linear layers quantized, but for the head."""
    model: Any = meta_model(config, dtype)
    per_weight = QUANTIZED_BYTES.get(quantization)
    saved = 0.0
    if per_weight is not None:
        head = model.get_output_embeddings()
        linear = (m for m in model.modules() if isinstance(m, nn.Linear) and m is not head)
        saved = sum(m.weight.numel() * (m.weight.element_size() - per_weight) for m in linear)
    return int(sum(parameter.nbytes for parameter in model.parameters()) - saved)


@dataclass(frozen=True, kw_only=True)
class MicroBatchShape:
    """Documents side by side."""

    lengths: tuple[int, ...]
    """Of what each has in the row."""
    prefixes: tuple[Prefix, ...] = ()
    """What each takes from another; nothing where this is empty."""

    @classmethod
    def of(cls, num_tokens: int, document_tokens: int, shared_tokens: int = 0) -> MicroBatchShape:
        """As many documents of a length as make `num_tokens`, the last one shorter.

        With `shared_tokens` every second one has these in common with the one before, and the others to itself.
        """
        whole = min(document_tokens, num_tokens)
        if not shared_tokens or shared_tokens >= whole:
            full, rest = divmod(num_tokens, whole)
            return cls(lengths=(whole,) * full + ((rest,) if rest else ()))
        lengths: list[int] = []
        prefixes: list[Prefix] = []
        while (rest := num_tokens - sum(lengths)) > 0:
            number = len(lengths)
            prefixes.append(Prefix(number - 1, shared_tokens) if number % 2 else Prefix(0, 0))
            lengths.append(min(rest, whole - prefixes[-1].length))
        return cls(lengths=tuple(lengths), prefixes=tuple(prefixes))

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def model_inputs(self) -> dict[str, Any]:
        layout = PackedLayout.from_lengths(self.lengths, prefixes=self.prefixes)
        inputs = layout.model_kwargs() | {"position_ids": layout.position_ids.to("meta")}
        if layout.shared_keys is not None:
            inputs["shared_keys"] = SharedKeys(*(places.to("meta") for places in layout.shared_keys))
        ids_1T = torch.zeros(1, self.num_tokens, dtype=torch.long, device="meta")
        return inputs | {"input_ids": ids_1T, "use_cache": False}


@lru_cache(maxsize=4096)
def _causal_pairs(lengths: tuple[int, ...], window: int | None) -> int:
    """Query-key pairs of causal attention within documents."""
    if window is None:
        return sum(n * (n + 1) // 2 for n in lengths)
    return sum(n * (n + 1) // 2 if n <= window else window * (window + 1) // 2 + (n - window) * window for n in lengths)


@torch.library.custom_op("gym_planning::attention", mutates_args=())
def attention_op(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_pairs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for any fused attention: reads q, k and v, keeps them, its output and one number a row for later."""
    raise RuntimeError("simulated attention has no values")


@attention_op.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_pairs: int) -> Any:
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("gym_planning::attention_backward", mutates_args=())
def attention_backward_op(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    num_pairs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `attention_op`."""
    raise RuntimeError("simulated attention has no values")


@attention_backward_op.register_fake
def _(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.num_pairs = inputs[3]


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*attention_backward_op(grad, *ctx.saved_tensors, ctx.num_pairs), None)


attention_op.register_autograd(_backward, setup_context=_setup)


@register_flop_formula(torch.ops.gym_planning.attention, get_raw=True)
def _attention_flops(query: torch.Tensor, key: Any, value: Any, num_pairs: int, **_: Any) -> float:
    """4 E a pair and head: QK and PV."""
    return 4.0 * query.shape[1] * query.shape[-1] * num_pairs


@register_flop_formula(torch.ops.gym_planning.attention_backward, get_raw=True)
def _attention_backward_flops(grad: Any, query: torch.Tensor, *rest: Any, **_: Any) -> float:
    """Two and a half times the forward: four products, and QK once more."""
    return 10.0 * query.shape[1] * query.shape[-1] * rest[-1]


def _simulated_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    shared_keys: SharedKeys | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    assert cu_seq_lens_q is not None
    lengths = tuple(torch.diff(cu_seq_lens_q).tolist())
    num_pairs = _causal_pairs(lengths, sliding_window)
    if shared_keys is not None:
        assert cu_seq_lens_k is not None
        key, value = (whole_documents(x, 2, shared_keys) for x in (key, value))
        whole = tuple(torch.diff(cu_seq_lens_k).tolist())
        shared = tuple(a - b for a, b in zip(whole, lengths, strict=True))
        num_pairs = _causal_pairs(whole, sliding_window) - _causal_pairs(shared, sliding_window)
    out, _ = attention_op(query, key, value, num_pairs)
    return out.transpose(1, 2), None
