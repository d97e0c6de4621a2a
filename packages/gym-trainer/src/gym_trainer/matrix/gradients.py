"""Which weights learn: gradients added up over steps, and layers beside which an adapter gets none."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn


def watch(model: nn.Module, chosen: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """The absolute gradients of the chosen trained weights, added up over all steps that follow."""
    totals: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and chosen(name):
            totals[name] = torch.zeros_like(parameter)

            def add(weight: torch.Tensor, total: torch.Tensor = totals[name]) -> None:
                if weight.grad is not None:
                    total += weight.grad.abs()

            parameter.register_post_accumulate_grad_hook(add)
    return totals


def still_layers(totals: dict[str, torch.Tensor]) -> list[str]:
    """The adapted layers, by their names in the base model, of whose adapter nothing got a gradient."""
    learns: dict[str, bool] = {}
    for name, total in totals.items():
        layer = re.sub(r"(\.base_layer)*\.lora_.*$", "", name.removeprefix("base_model.model."))
        learns[layer] = learns.get(layer, False) or bool(total.any())
    return sorted(layer for layer, any_gradient in learns.items() if not any_gradient)


def learning_layers(model: Any, documents: Sequence[torch.Tensor]) -> set[str]:
    """The layers with a weight of their own that gets a gradient when `model` is trained whole on the documents [L].

    An adapter beside one of these must learn. The others have no part in what the model writes, such as attention to
    an encoder that is not there.
    """
    parameters = dict(model.requires_grad_(True).train().named_parameters())
    for ids in documents:
        model(input_ids=ids[None], labels=ids[None], use_cache=False).loss.backward()
    return {
        name.rpartition(".")[0]
        for name, parameter in parameters.items()
        if parameter.grad is not None and bool(parameter.grad.any())
    }
