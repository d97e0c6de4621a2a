"""The adapter added into the base: a model that needs no peft. Shown to say what the adapter said, or refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from gym_sdk.errors import ModelError, RunFailed, UserError
from gym_serve.models import load_adapter, load_model
from gym_serve.models.adapters import grow_embeddings
from gym_trainer.exporting.dequantize import copy_dequantized
from gym_trainer.exporting.folder import Base, complete_or_absent, write_companions
from gym_trainer.exporting.probe import probe_ids, probe_logits, relative_distance

MergeDtype = Literal["float32", "bfloat16"]
Quantization = Literal["none", "nf4", "int8"]

_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest relative distance between the logits with the adapter and those of the merged weights."""
_QUANTIZED_TOLERANCE = {"nf4": 1e-3, "int8": 0.05}
"""int8 also rounds what goes into a layer, which the merged model does not."""
_LARGEST_LOSS = 0.5
"""Rounding may take at most this part of what the adapter changed."""
_MAX_SHARD_SIZE = "4GB"


@dataclass(frozen=True, kw_only=True)
class MergeCheck:
    """What the probe showed, as relative distances between logits."""

    adapter_to_merged: float
    base_to_adapter: float


class SharedWeights(ModelError):
    """Layers that use one weight have an update each, so that no merged weight can hold them."""


def require_own_weights(model: Any) -> None:
    """Raise SharedWeights for a peft model in which several adapted layers share their base's weight, as the layers of
    Zamba's shared block do."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    users: dict[int, list[str]] = {}
    for name, module in model.get_base_model().named_modules():
        weight = getattr(module.get_base_layer(), "weight", None) if isinstance(module, BaseTunerLayer) else None
        if getattr(module, "tied_adapter", None) is not None:  # new tokens of a tied head: the embedding's own update
            continue
        if weight is not None and not name.endswith(".base_layer"):
            users.setdefault(id(weight), []).append(name)
    shared = [names for names in users.values() if len(names) > 1]
    if shared:
        raise SharedWeights(
            f"{shared[0][0]} and {shared[0][1]} use one weight, and each has an update of its own: no merged model can "
            f"hold them ({len(shared)} weights)",
            hint="serve the adapter beside its base",
        )


def merge_adapter(
    base: Base,
    adapter: Path,
    out: Path,
    *,
    dtype: MergeDtype,
    metadata: dict[str, Any],
    quantization: Quantization = "none",
    replace: bool = False,
) -> MergeCheck:
    """Write base and adapter as one model folder. The sum is made in float32, whatever it is stored in.

    `quantization` is how the base was held in training: the adapter is added to those weights, dequantized.

    Raises:
        OutputInUse: `out` has something in it.
        SharedWeights: layers that use one weight have an update each.
        UserError: the adapter changes nothing, or `dtype` would round away most of what it changes.
        RunFailed: the merged weights do not say what the adapter said.
    """
    with complete_or_absent(out, replace=replace) as staged:
        ids = probe_ids(base)
        model = _load(base, "none")
        tolerance = _TOLERANCE[dtype]
        if quantization == "none":
            base_TV = probe_logits(model, ids)
            _untie_adapted_head(model, adapter)
            with_adapter = load_adapter(model, adapter)
            adapter_TV = probe_logits(with_adapter, ids)
        else:
            quantized = _load(base, quantization)
            copy_dequantized(quantized, model)
            base_TV = probe_logits(quantized, ids)
            adapter_TV = probe_logits(load_adapter(quantized, adapter), ids)
            del quantized
            tolerance = max(tolerance, _QUANTIZED_TOLERANCE[quantization])
            _untie_adapted_head(model, adapter)
            with_adapter = load_adapter(model, adapter)
        require_own_weights(with_adapter)
        effect = relative_distance(base_TV, adapter_TV)
        if effect == 0:
            raise UserError(
                f"the adapter in {adapter} changes nothing: the merged model would be the base model",
                hint="was it trained for a single step of warm-up?",
            )
        merged = with_adapter.merge_and_unload(safe_merge=True)
        # Gemma 3 and its kind keep buffers that no file holds: only the weights change their precision.
        for parameter in merged.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
        merged.config.dtype = getattr(torch, dtype)
        error = relative_distance(adapter_TV, probe_logits(merged.float() if dtype == "float32" else merged, ids))
        _require_same(error, effect, dtype, tolerance)
        merged.save_pretrained(str(staged), safe_serialization=True, max_shard_size=_MAX_SHARD_SIZE)
        write_companions(staged, base, merged, metadata)
    return MergeCheck(adapter_to_merged=error, base_to_adapter=effect)


def _load(base: Base, quantization: Quantization) -> Any:
    """The base with rows for new tokens, whose values the adapter brings."""
    model = load_model(base.resolved, dtype=torch.float32, quantization=quantization)
    if base.new_token_ids:
        grow_embeddings(model, max(base.new_token_ids) + 1)
    return model


def _require_same(error: float, effect: float, dtype: MergeDtype, tolerance: float) -> None:
    if not error <= tolerance:
        raise RunFailed(f"the merged weights do not say what the adapter said: logits are {error:.1e} apart")
    if error > _LARGEST_LOSS * effect:
        raise UserError(
            f"{dtype} would round away what the adapter changes: rounding moves the logits by {error:.1e}, the "
            f"adapter by {effect:.1e}",
            hint="merge into float32 (--dtype float32), or serve the adapter beside its base",
        )


def _untie_adapted_head(model: Any, adapter: Path) -> None:
    """An update of a tied output head would also change the input embeddings: give the head weights of its own."""
    from gym_serve.models import inspect_adapter

    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embeddings.weight:
        return
    names = {name for name, module in model.named_modules() if module is head or module is embeddings}
    # Rows of new tokens are updated in both at once.
    updated = {key for key in inspect_adapter(adapter).shapes if ".token_adapter." not in key}
    if any(f".{name}." in key for name in names for key in updated):
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.get_text_config().tie_word_embeddings = False
        model.config.tie_word_embeddings = False
