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


def layers_that_learn(totals: dict[str, torch.Tensor]) -> dict[str, bool]:
    """Of each adapted layer, by its name in the base model, whether anything of its adapter got a gradient."""
    learns: dict[str, bool] = {}
    for name, total in totals.items():
        layer = re.sub(r"(\.base_layer)*\.lora_.*$", "", name.removeprefix("base_model.model."))
        learns[layer] = learns.get(layer, False) or bool(total.any())
    return learns


def bypassed(learns: dict[str, bool], model: Any, documents: Sequence[torch.Tensor]) -> list[str]:
    """The adapted layers that get no gradient although their own weight does when `model` is trained whole on the
    documents [L]: the model's code reads the weight instead of calling the layer.

    The other layers without one have no part in what the model writes, such as attention to an encoder that is not
    there; or they share a weight with a layer whose adapter learns.
    """
    parameters = dict(model.requires_grad_(True).train().named_parameters(remove_duplicate=False))
    for ids in documents:
        model(input_ids=ids[None], labels=ids[None], use_cache=False).loss.backward()
    users: dict[int, set[str]] = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None and bool(parameter.grad.any()):
            users.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
    called = {layer for layers in users.values() if any(learns.get(layer) for layer in layers) for layer in layers}
    read = {layer for layers in users.values() for layer in layers}
    return sorted(layer for layer in (read - called) & learns.keys() if not learns[layer])
