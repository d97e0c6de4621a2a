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
    """peft's LoRA linear layer with another forward, for the adapter that was active when it became one."""

    lean_adapter: str

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        name = self.lean_adapter
        if self.disable_adapters or self.merged or args or kwargs or self.active_adapters != [name]:
            return super().forward(x, *args, **kwargs)
        base = cast(nn.Linear, self.get_base_layer())
        a_RI = (cast(nn.Linear, self.lora_A[name]).weight * self.scaling[name]).to(x.dtype)
        b_OR = cast(nn.Linear, self.lora_B[name]).weight.to(x.dtype)
        if x.device.type == "cpu" and not any(parameter.requires_grad for parameter in base.parameters()):
            x_TI = x.flatten(0, -2)
            out_TO = cast(torch.Tensor, _AddedProduct.apply(x_TI, base.weight, base.bias, a_RI, b_OR))
            return out_TO.view(*x.shape[:-1], -1)  # made here: models may change it in place (Llama 4)
        return linear(x, base.weight, base.bias) + linear(linear(x, a_RI), b_OR)


class _AddedProduct(torch.autograd.Function):
    """W x + b + B A x with frozen W and b: the small product is added inside the multiplication, in both directions.

    A processor moves activations slowly: the sum of two finished products reads and writes three of them more.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        a_RI: torch.Tensor,
        b_OR: torch.Tensor,
    ) -> torch.Tensor:
        inner_TR = linear(x_TI, a_RI)
        ctx.save_for_backward(x_TI, inner_TR, weight_OI, a_RI, b_OR)
        return linear(x_TI, weight_OI, bias_O).addmm_(inner_TR, b_OR.T)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TI, inner_TR, weight_OI, a_RI, b_OR = ctx.saved_tensors
        gradient_TO = gradients[0]
        inner_gradient_TR = gradient_TO @ b_OR
        x_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = (gradient_TO @ weight_OI).addmm_(inner_gradient_TR, a_RI)
        return x_gradient, None, None, inner_gradient_TR.T @ x_TI, gradient_TO.T @ inner_TR


def why_not_lean(module: nn.Module) -> str | None:
    """Why a LoRA layer keeps peft's forward, or None when it need not."""
    if type(module) is not Linear:
        return f"{type(module).__name__} is not peft's plain linear layer"
    if len(module.active_adapters) != 1:
        return "several adapters are active"
    name = module.active_adapters[0]
    if name not in module.lora_A:
        return "the trained adapter leaves it out"
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
            cast(LeanLoraLinear, module).lean_adapter = module.active_adapters[0]
        yield
    finally:
        for module in changed:
            module.__class__ = Linear
