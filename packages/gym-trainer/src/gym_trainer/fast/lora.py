"""LoRA's small products in the model's own precision, beside the large one.

peft keeps A and B in float32 and, without autocast, casts every input up to multiply with them: the input is copied at
twice its size, kept for the backward pass, and multiplied outside the matrix units' fast path. Here A and B are cast
down instead (they are small), so that no large tensor is made or kept for them. A and B stay float32 for the optimizer.

Instances change their class for as long as the context lasts; peft's own classes, parameter names and saving do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft.tuners.lora.layer import Linear
from torch import nn
from torch.nn.functional import linear


class LeanLoraLinear(Linear):
    """peft's LoRA linear layer with another forward."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.disable_adapters or self.merged or args or kwargs:
            return super().forward(x, *args, **kwargs)
        name = self.active_adapters[0]
        base = cast(nn.Linear, self.get_base_layer())
        a_RI = (cast(nn.Linear, self.lora_A[name]).weight * self.scaling[name]).to(x.dtype)
        b_OR = cast(nn.Linear, self.lora_B[name]).weight.to(x.dtype)
        return linear(x, base.weight, base.bias) + linear(linear(x, a_RI), b_OR)


def why_not_lean(module: nn.Module) -> str | None:
    """Why a LoRA layer keeps peft's forward, or None when it need not."""
    if type(module) is not Linear:
        return f"{type(module).__name__} is not peft's plain linear layer"
    if len(module.active_adapters) != 1:
        return "several adapters are active"
    name = module.active_adapters[0]
    if not isinstance(module.lora_dropout[name], nn.Identity):
        return "adapter.dropout is on"
    if name in module.lora_variant:
        return "adapter.dora is on"
    if module.lora_bias[name]:
        return "the adapter has biases"
    if type(module.get_base_layer()) is not nn.Linear:
        return f"the base layer is a {type(module.get_base_layer()).__name__}"
    return None


def lora_layers(model: nn.Module) -> list[Linear]:
    """Every LoRA layer of a peft model; [] of any other."""
    return [module for module in model.modules() if isinstance(module, Linear)]


@contextmanager
def lean_lora(model: nn.Module) -> Iterator[None]:
    """The model with lean LoRA layers wherever they do the same."""
    changed = [module for module in lora_layers(model) if why_not_lean(module) is None]
    try:
        for module in changed:
            module.__class__ = LeanLoraLinear
        yield
    finally:
        for module in changed:
            module.__class__ = Linear
