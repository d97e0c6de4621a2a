"""Which layers can be fused, and a model with them fused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from transformers import AttentionInterface

from gym_sdk.errors import GymError
from gym_trainer.fast.fused.layer import FusedLayer
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
        reason = why_not_lean(m) if isinstance(m, LoraLayer) else None
        if reason is None and not isinstance(m, LoraLayer) and type(m) is not nn.Linear:
            reason = f"{type(m).__name__} is not a plain linear layer"
        if reason is not None:
            return reason
    return None


@contextmanager
def fused_layers(model: nn.Module, num_recomputed: int = 0) -> Iterator[None]:
    """The model with fused decoder layers, the first `num_recomputed` of them keeping nothing but their input.

    Raises:
        LayersDiffer: the layers are of another kind, or a forward of a few tokens came out differently.
        ValueError: the model has fewer layers.
    """
    layers = decoder_layers(model)
    if num_recomputed > len(layers):
        raise ValueError(f"the model has {len(layers)} decoder layers, fewer than the {num_recomputed} to recompute")
    if reason := why_not_fused(model):
        raise LayersDiffer(reason)
    body = _body(model)
    expected = _probe(body)
    fused: list[FusedLayer] = []
    try:
        for number, layer in enumerate(layers):
            fused.append(FusedLayer(layer, recompute=number < num_recomputed))
        with forwards_replaced({layer.layer: layer.forward for layer in fused}):
            _show_equal(expected, _probe(body))
            yield
    finally:
        for layer in fused:
            layer.release()


_PROBE_LENGTHS = (9, 7)


def _body(model: nn.Module) -> Any:
    causal = cast(Any, model.get_base_model() if hasattr(model, "get_base_model") else model)
    return getattr(causal, causal.base_model_prefix)


@torch.no_grad()
def _probe(body: Any) -> torch.Tensor | None:
    """What the layers make of a few tokens; None where weights are not there (a plan's simulation)."""
    weight = body.get_input_embeddings().weight
    if weight.is_meta or body.config._attn_implementation not in AttentionInterface():
        return None
    layout = PackedLayout.from_lengths(_PROBE_LENGTHS, weight.device)
    ids_1T = torch.arange(3, 3 + sum(_PROBE_LENGTHS), device=weight.device)[None] % weight.shape[0]
    was_training = body.training
    body.train()  # fused layers leave evaluation to the layers' own forward
    try:
        return body(input_ids=ids_1T, use_cache=False, **layout.model_kwargs()).last_hidden_state
    finally:
        body.train(was_training)


def _show_equal(expected: torch.Tensor | None, got: torch.Tensor | None) -> None:
    if expected is None or got is None:
        return
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 0.05
    error = float((got.double() - expected.double()).norm() / expected.double().norm())
    if not error <= tolerance:
        raise LayersDiffer(f"hidden states of fused layers differ by {error:.1e} of their size")
