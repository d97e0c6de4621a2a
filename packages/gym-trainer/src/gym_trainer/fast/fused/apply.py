"""Which layers can be fused, and a model with them fused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from transformers import AttentionInterface

from gym_sdk.errors import GymError
from gym_trainer.fast.fused.layer import FusedLayer
from gym_trainer.fast.fused.offload import HostStore
from gym_trainer.fast.fused.weights import Refresh, padded_columns
from gym_trainer.fast.layers import decoder_layers, forwards_replaced
from gym_trainer.fast.lora import why_not_lean
from gym_trainer.fast.packing import PackedLayout

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class LayersDiffer(GymError):
    """Fused layers would not compute what the model's own do."""


def why_not_fused(model: nn.Module) -> str | None:
    """Why the model's layers keep their own forward, or None when they can be fused.

    Judged by what the layers are made of; `fused_layers` shows on the model itself that the numbers are the same.
    """
    layers = decoder_layers(model)
    if not layers:
        return "no decoder layers were found"
    return next((reason for reason in map(_why_not, layers) if reason is not None), None)


def _why_not(layer: nn.Module) -> str | None:
    name = type(layer).__name__
    if set(dict(layer.named_children())) != _PARTS:
        return f"{name} is not attention and MLP behind one norm each"
    module = cast(Any, layer)
    attention, mlp = set(dict(module.self_attn.named_children())), set(dict(module.mlp.named_children()))
    if attention not in (_PROJECTIONS, _PROJECTIONS | _HEAD_NORMS):
        return f"the attention of {name} is not made of four projections"
    if mlp != _MLP or "SiLU" not in type(module.mlp.act_fn).__name__:
        return f"the MLP of {name} is not SwiGLU"
    if getattr(module.self_attn, "attention_dropout", 0.0):
        return "attention dropout is on"
    if getattr(module.self_attn, "head_dim", 1) % 2:
        return "the head dimension is odd"
    norms = [m for m in layer.modules() if type(m).__name__.endswith("Norm")]
    if any(not hasattr(m, "variance_epsilon") or [n for n, _ in m.named_parameters()] != ["weight"] for m in norms):
        return f"the norms of {name} are not root-mean-square norms"
    trained_elsewhere = [n for n, p in layer.named_parameters() if p.requires_grad and ".lora_" not in n]
    if trained_elsewhere:
        return "weights of the base are trained"
    linear = [module.self_attn.get_submodule(n) for n in sorted(_PROJECTIONS)]
    linear += [module.mlp.get_submodule(n) for n in sorted(_MLP - {"act_fn"})]
    if not any(isinstance(m, LoraLayer) for m in linear):
        return "the layers have no LoRA"
    for m in linear:
        reason = why_not_lean(cast(nn.Module, m)) if isinstance(m, LoraLayer) else None
        if reason is None and not isinstance(m, LoraLayer) and type(m) is not nn.Linear:
            reason = f"{type(m).__name__} is not a plain linear layer"
        if reason is not None:
            return reason
    return None


@contextmanager
def fused_layers(model: nn.Module, num_recomputed: int = 0, *, offload: bool = False) -> Iterator[None]:
    """The model with fused decoder layers, the first `num_recomputed` of them keeping nothing but their input.

    With `offload`, these inputs are kept in host memory.

    Raises:
        LayersDiffer: the layers are of another kind, or a forward of a few tokens came out differently.
        ValueError: the model has fewer layers.
    """
    layers = decoder_layers(model)
    if num_recomputed > len(layers):
        raise ValueError(f"the model has {len(layers)} decoder layers, fewer than the {num_recomputed} to recompute")
    if reason := why_not_fused(model):
        raise LayersDiffer(reason)
    fused: list[FusedLayer] = []
    store = HostStore(next(model.parameters()).device) if offload else None
    try:
        for number, layer in enumerate(layers):
            fused.append(FusedLayer(layer, recompute=number < num_recomputed, store=store))
            _give_back_memory()
        fused[0].refresh = Refresh([joined for layer in fused for joined in layer.joined])
        _show_equal(_body(model), fused)
        with forwards_replaced({layer.layer: layer.forward for layer in fused}):
            yield
    finally:
        if fused:
            fused[0].refresh = None  # it knows every matrix; else all of them would be there until the last is released
        for layer in fused:
            layer.release()
            _give_back_memory()


def _give_back_memory() -> None:
    """The old weights' blocks fit no joined matrix: kept by the allocator, they would be held beside the new ones."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def margin_bytes(model: nn.Module) -> int:
    """What a model's joined weights take beyond the weights themselves: the rows and columns of LoRA."""
    return sum(j.num_lora * (j.num_outputs + j.num_inputs + j.num_lora) * j.element_bytes for j in _joined(model))


def padding_flops_per_token(model: nn.Module) -> int:
    """Of a forward and backward pass, what is spent on the zeros among LoRA's columns: no part of the model's work."""
    return sum(
        6 * (j.num_lora * (j.num_outputs + j.num_inputs) - sum(r * (o + j.num_inputs) for r, o in j.ranks))
        for j in _joined(model)
    )


class _Joined(NamedTuple):
    num_inputs: int
    num_outputs: int
    num_lora: int
    ranks: list[tuple[int, int]]
    """Rank and outputs of each layer with LoRA."""
    element_bytes: int


def _joined(model: nn.Module) -> Iterator[_Joined]:
    for layer in decoder_layers(model):
        for members in _JOINED:
            modules = [layer.get_submodule(name) for name in members]
            bases = [cast(Any, m.get_base_layer() if isinstance(m, LoraLayer) else m) for m in modules]
            ranks = [
                (m.r[m.active_adapters[0]], base.out_features)
                for m, base in zip(modules, bases, strict=True)
                if isinstance(m, LoraLayer)
            ]
            yield _Joined(
                num_inputs=bases[0].in_features,
                num_outputs=sum(base.out_features for base in bases),
                num_lora=padded_columns(sum(rank for rank, _ in ranks)),
                ranks=ranks,
                element_bytes=bases[0].weight.element_size(),
            )


_JOINED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
_PROBE_LENGTHS = (150, 57)
"""Two documents, and a last block of rows that is not full."""


def _body(model: nn.Module) -> Any:
    wrapper = cast(Any, model)
    causal = wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else wrapper
    return getattr(causal, causal.base_model_prefix)


@torch.no_grad()
def _show_equal(body: Any, fused: list[FusedLayer]) -> None:
    """Each layer's own forward and the fused one on the same hidden states of a few tokens."""
    weight = body.get_input_embeddings().weight
    if weight.is_meta or body.config._attn_implementation not in AttentionInterface():
        return
    layout = PackedLayout.from_lengths(_PROBE_LENGTHS, weight.device)
    ids_1T = torch.arange(3, 3 + sum(_PROBE_LENGTHS), device=weight.device)[None] % weight.shape[0]
    with forwards_replaced({layer.layer: partial(_compared, layer) for layer in fused}):
        body(input_ids=ids_1T, use_cache=False, **layout.model_kwargs())


def _compared(fused: FusedLayer, x_BLD: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Both forwards, the layer's own being the one that counts. What a layer adds may be small beside what it gets."""
    expected = fused.own_forward(x_BLD, *args, **kwargs)
    error = (fused.forward(x_BLD, *args, **kwargs).double() - expected.double()).norm()
    added = (expected.double() - x_BLD.double()).norm()
    tolerance = 1e-3 if x_BLD.dtype in (torch.float32, torch.float64) else 0.1
    if not error <= tolerance * added + torch.finfo(x_BLD.dtype).eps * expected.double().norm():
        raise LayersDiffer(f"what a fused layer adds differs by {float(error / added):.1e} from what its own form adds")
    return expected
