"""From an `adapter:` section to a model in which just that is trained."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gym_sdk.errors import ModelError
from gym_sdk.spec.adapter import AdapterSpec, FullAdapter, LoraAdapter
from gym_serve.models.load import SCORE_HEAD

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_INIT = {"default": True, "pissa": "pissa", "olora": "olora"}


@dataclass(frozen=True, kw_only=True)
class TrainableModel:
    """A model ready to be trained, and what of it is."""

    model: Any
    """The transformers model itself, or a peft model around it."""
    num_trained: int
    num_weights: int
    notes: tuple[str, ...] = ()
    """What a person should know, such as weights that stay frozen."""


def attach(model: PreTrainedModel, adapter: AdapterSpec, *, seed: int) -> TrainableModel:
    """Freeze and add what the section says.

    Raises:
        ModelError: targets that match no module, a rank larger than a layer, an `init_from` that does not fit.
    """
    import torch
    from transformers import set_seed

    set_seed(seed)
    notes: list[str] = []
    if isinstance(adapter, FullAdapter):
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        trained: Any = model
    elif adapter.init_from is not None:
        from gym_serve.models import load_adapter

        trained = load_adapter(model, adapter.init_from, trainable=True)
    else:
        from peft import get_peft_model

        trained = get_peft_model(model, lora_config(model, adapter))
        notes += _frozen_experts(model)
    parameters = list(trained.parameters())
    num_trained = sum(p.numel() for p in parameters if p.requires_grad)
    if num_trained == 0:
        raise ModelError("nothing is trained", hint="see adapter.targets")
    if any(p.dtype == torch.float16 and p.requires_grad for p in parameters):
        # A loss scaler needs float32 weights to scale back to.
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return TrainableModel(
        model=trained,
        num_trained=num_trained,
        num_weights=sum(p.numel() for p in parameters) - (num_trained if trained is not model else 0),
        notes=tuple(notes),
    )


def lora_config(model: PreTrainedModel, adapter: LoraAdapter) -> Any:
    """peft's configuration for the section, checked against the model's layers."""
    from peft import LoraConfig

    layers = target_layers(model, adapter.targets)
    smallest = min(layers, key=lambda name: min(_size(layers[name])))
    if adapter.rank > min(_size(layers[smallest])):
        raise ModelError(
            f"adapter.rank is {adapter.rank}, but {smallest} is only {' x '.join(map(str, _size(layers[smallest])))}",
            hint=f"use a rank of at most {min(_size(layers[smallest]))}, or other adapter.targets",
        )
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha if adapter.alpha is not None else 2 * adapter.rank,
        lora_dropout=adapter.dropout,
        init_lora_weights=_INIT[adapter.init],
        use_rslora=adapter.scaling == "rslora",
        use_dora=adapter.dora,
        target_modules=adapter.targets,
        # peft trains the new head of a sequence classifier whole, and keeps it with the adapter
        task_type="SEQ_CLS" if hasattr(model, SCORE_HEAD) else "CAUSAL_LM",
    )


def target_layers(model: PreTrainedModel, targets: str | list[str]) -> dict[str, nn.Module]:
    """The linear layers that `adapter.targets` names, by name.

    Raises:
        ModelError: a target that matches nothing, with the names there are.
    """
    linear = linear_layers(model)
    if targets == "all-linear":
        head = model.get_output_embeddings() or getattr(model, SCORE_HEAD, None)
        return {name: module for name, module in linear.items() if module is not head}
    endings = sorted({name.rpartition(".")[2] for name in linear})
    hint = f"this model's linear layers end in {', '.join(endings)}"
    if isinstance(targets, list):
        for target in targets:
            if not any(name == target or name.endswith(f".{target}") for name in linear):
                raise ModelError(f"adapter.targets: {target} matches no linear layer", hint=hint)
        return {n: m for n, m in linear.items() if any(n == t or n.endswith(f".{t}") for t in targets)}
    try:
        found = {name: module for name, module in linear.items() if re.fullmatch(targets, name)}
    except re.error as error:
        raise ModelError(f"adapter.targets is not a regular expression: {error}", hint=hint) from None
    if not found:
        raise ModelError(f"adapter.targets: no linear layer's full name matches {targets}", hint=hint)
    return found


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """All linear layers, also quantized ones and GPT-2's transposed ones. `all-linear` leaves the output head out."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}


def _size(layer: nn.Module) -> tuple[int, int]:
    if hasattr(layer, "in_features"):
        return int(layer.in_features), int(layer.out_features)
    return int(layer.weight.shape[0]), int(layer.weight.shape[1])


def _frozen_experts(model: PreTrainedModel) -> list[str]:
    """Fused experts are 3-D parameters, not linear layers: 'all linears' leaves them out without a word."""
    experts = [name for name, p in model.named_parameters() if p.ndim == 3 and "expert" in name]
    if not experts:
        return []
    return [f"{len(experts)} fused expert weights, such as {experts[0]}, stay frozen: they are no linear layers"]
