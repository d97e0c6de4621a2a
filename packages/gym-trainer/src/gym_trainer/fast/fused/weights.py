"""Linear layers that read the same input as one matrix, with LoRA's A and B as more rows and columns of it.

    M = [[W, B],      W: the frozen weights of all layers, one below the other
         [A, 0]]      A, B: LoRA's, scaled and in the model's precision, each layer's in its own rows and columns

The output with LoRA's part is one product of `[x | x A^T]` with the first rows of M, and the gradient of the input one
product of `[dy | dy B]` with its first columns: a few more columns for the large product instead of a product of their
own for each small one, whose result would be written, read and added.

The layers' own weights become views of M for as long as it lives: nothing is held twice.

Legend: T tokens, I width of the input, O of all outputs together, N columns of LoRA with what pads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn

if TYPE_CHECKING:
    from gym_trainer.fast.fused._gather_kernels import Gradients, Scatter

_COLUMNS = 64
"""Columns of LoRA are padded to a multiple: what a matrix product takes at once, in rows of whole 128 bytes. Padding to
16 or 32 where that is enough saves 0.3 GiB of 8B and costs 2% of the speed (H200)."""


@dataclass(frozen=True)
class _Part:
    """One linear layer's place in the matrix."""

    base: nn.Linear
    rows: slice
    a: nn.Parameter | None = None
    b: nn.Parameter | None = None
    scaling: float = 1.0
    lora: slice = field(default_factory=lambda: slice(0, 0))


class JoinedWeight:
    """The matrix of linear layers with the same input."""

    def __init__(self, layers: list[nn.Module]) -> None:
        """`layers`: frozen `nn.Linear`s, or peft's LoRA layers around them (`gym_trainer.fast.lora.why_not_lean`)."""
        self.parts: list[_Part] = []
        num_outputs = num_lora = 0
        for layer in layers:
            base = _base(layer)
            rows = slice(num_outputs, num_outputs + base.out_features)
            num_outputs = rows.stop
            if isinstance(layer, LoraLinear):
                name = layer.active_adapters[0]
                a = cast(nn.Parameter, layer.lora_A[name].weight)
                b = cast(nn.Parameter, layer.lora_B[name].weight)
                lora = slice(num_lora, num_lora + a.shape[0])
                num_lora = lora.stop
                self.parts.append(_Part(base, rows, a, b, layer.scaling[name], lora))
            else:
                self.parts.append(_Part(base, rows))
        first = self.parts[0].base
        self.num_inputs: int = first.in_features
        self.num_outputs: int = num_outputs
        self.num_lora: int = padded_columns(num_lora)
        self.matrix: torch.Tensor = first.weight.new_empty(num_outputs + self.num_lora, self.num_inputs + self.num_lora)
        self.matrix[num_outputs:].zero_()
        self.matrix[:, self.num_inputs :].zero_()
        self.bias_O: torch.Tensor | None = self._joined_bias()
        self._gradients: Gradients | None = None
        for part in self.parts:
            view = self.matrix[part.rows, : self.num_inputs]
            view.copy_(part.base.weight.data)
            part.base.weight.data = view

    @property
    def trained(self) -> list[nn.Parameter]:
        """A and B of each layer that has them."""
        return [weight for part in self.parts for weight in (part.a, part.b) if weight is not None]

    @property
    def lora_a(self) -> torch.Tensor:
        """[N, I], scaled."""
        return self.matrix[self.num_outputs :, : self.num_inputs]

    @property
    def lora_b(self) -> torch.Tensor:
        """[N, O]: transposed, the columns of M beside the weights."""
        return self.matrix[: self.num_outputs, self.num_inputs :].T

    @property
    def places(self) -> list[tuple[nn.Parameter, torch.Tensor, float]]:
        """Each trained weight, where it lies in the matrix, and what it is multiplied by there."""
        places = []
        for part in self.parts:
            if part.a is not None and part.b is not None:
                columns = slice(self.num_inputs + part.lora.start, self.num_inputs + part.lora.stop)
                rows = slice(self.num_outputs + part.lora.start, self.num_outputs + part.lora.stop)
                places.append((part.a, self.matrix[rows, : self.num_inputs], part.scaling))
                places.append((part.b, self.matrix[part.rows, columns], 1.0))
        return places

    def input_like(self, x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Room for `[x | x A^T]`, as a whole and in its two parts."""
        whole = x_TI.new_empty(x_TI.shape[0], self.num_inputs + self.num_lora)
        return whole, whole[:, : self.num_inputs], whole[:, self.num_inputs :]

    def output_like(self, x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Room for `[dy | dy B]`, as a whole and in its two parts."""
        whole = x_TI.new_empty(x_TI.shape[0], self.num_outputs + self.num_lora)
        return whole, whole[:, : self.num_outputs], whole[:, self.num_outputs :]

    def forward(self, whole_TI: torch.Tensor, out_TO: torch.Tensor | None = None) -> torch.Tensor:
        """The layers' outputs side by side, from `[x | x A^T]`."""
        weight = self.matrix[: self.num_outputs].T
        if self.bias_O is not None:
            return torch.addmm(self.bias_O, whole_TI, weight, out=out_TO)
        return torch.mm(whole_TI, weight, out=out_TO)

    def backward(self, whole_TO: torch.Tensor) -> torch.Tensor:
        """The gradient of the input [T, I], from `[dy | dy B]`."""
        return torch.mm(whole_TO, self.matrix[:, : self.num_inputs])

    def gradients(self, parts_a_SNI: torch.Tensor, parts_b_SNO: torch.Tensor) -> list[torch.Tensor]:
        """Those of `trained`, out of the parts of the gradients of all A and all B."""
        trained = self.trained
        if trained[0].is_cuda:
            return self._collected(parts_a_SNI, parts_b_SNO)
        a_NI, b_NO = parts_a_SNI.sum(0), parts_b_SNO.sum(0)
        gradients: list[torch.Tensor] = []
        for part in self.parts:
            if part.a is not None and part.b is not None:
                gradients.append((a_NI[part.lora] * part.scaling).to(part.a.dtype))
                gradients.append(b_NO[part.lora, part.rows].T.to(part.b.dtype))
        return gradients

    def _collected(self, parts_a_SNI: torch.Tensor, parts_b_SNO: torch.Tensor) -> list[torch.Tensor]:
        from gym_trainer.fast.fused import _gather_kernels as kernels

        trained = self.trained
        if self._gradients is None:
            pieces, place = [], 0
            for part in self.parts:
                if part.a is not None and part.b is not None:
                    rank, start = part.a.shape[0], part.lora.start
                    pieces.append(((0, start, 0, rank, self.num_inputs, place), part.scaling))
                    place += part.a.numel()
                    pieces.append(((1, start, part.rows.start, part.base.out_features, rank, place), 1.0))
                    place += part.b.numel()
            self._gradients = kernels.gradients_of(pieces, trained[0].device)
        flat = kernels.collect(parts_a_SNI, parts_b_SNO, self._gradients, trained[0].dtype)
        parts = flat.split([weight.numel() for weight in trained])
        return [part.view(weight.shape) for part, weight in zip(parts, trained, strict=True)]

    def release(self) -> None:
        """Give the layers weights of their own again, and let go of the matrix: both are there for this one only."""
        for part in self.parts:
            part.base.weight.data = part.base.weight.data.clone(memory_format=torch.contiguous_format)
        self.matrix = self.matrix.new_empty(0)

    def _joined_bias(self) -> torch.Tensor | None:
        biases = [cast(torch.Tensor | None, part.base.bias) for part in self.parts]
        if all(bias is None for bias in biases):
            return None
        first = self.parts[0].base.weight
        zeros = (first.new_zeros(part.base.out_features) for part in self.parts)
        return torch.cat([zero if bias is None else bias.data for zero, bias in zip(zeros, biases, strict=True)])


class Refresh:
    """Takes over what the optimizer made of A and B, in one launch for a whole model."""

    def __init__(self, joined: list[JoinedWeight]) -> None:
        self._places = [place for weight in joined for place in weight.places]
        self._scatter: Scatter | None = None

    @torch.no_grad()
    def __call__(self) -> None:
        """Before a forward pass; the weights may have moved, too."""
        sources = [source for source, _, _ in self._places]
        first = sources[0]
        if first.is_cuda and all(s.is_contiguous() and s.dtype == first.dtype for s in sources):
            if self._scatter is None:
                from gym_trainer.fast.fused._gather_kernels import Scatter

                self._scatter = Scatter(
                    [target for _, target, _ in self._places], [scale for *_, scale in self._places]
                )
            self._scatter(sources)
            return
        for source, target, scale in self._places:
            target.copy_(source * scale)


def padded_columns(num_lora: int) -> int:
    """Columns for so many of LoRA. Layers without any have a few, too: one way of computing serves all."""
    return max(_COLUMNS, -(-num_lora // _COLUMNS) * _COLUMNS)


def _base(layer: nn.Module) -> nn.Linear:
    return cast(nn.Linear, layer.get_base_layer() if isinstance(layer, LoraLinear) else layer)
