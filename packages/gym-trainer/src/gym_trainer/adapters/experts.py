"""The experts of a mixture: adapted on purpose, or said to be frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_trainer.adapters.targets import linear_layers

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def fused_expert_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The weights that hold all experts of a layer at once, by name: parameters of their own, not linear layers."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        is_plain = isinstance(module, nn.Linear | Conv1D | nn.Embedding)
        if is_plain or not ("expert" in type(module).__name__.lower() or name.endswith("experts")):
            continue
        for own_name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 or (parameter.ndim == 2 and "bias" not in own_name):
                found[f"{name}.{own_name}"] = parameter
    return found


def expert_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Every weight that belongs to routed experts: fused ones, and linear layers of one expert each."""
    single = {f"{name}.weight": module.weight for name, module in linear_layers(model).items() if ".experts." in name}
    return fused_expert_weights(model) | single  # pyright: ignore[reportReturnType] - a linear layer's weight


def frozen_experts_note(model: PreTrainedModel) -> list[str]:
    """'All linears' leaves fused experts out: say so, and how to include them."""
    experts = list(fused_expert_weights(model))
    if not experts:
        return []
    return [
        f"{len(experts)} fused expert weights, such as {experts[0]}, stay frozen: they are no linear layers. "
        "To adapt them too, set adapter.experts=adapt"
    ]
