"""Linear layers of a served model in the layout that processors multiply few rows fastest with.

A decoding step has a row for each running request: few enough that reading the weights is most of the work, and
PyTorch's matrix product (MKL, or oneDNN for bfloat16) lays them out anew in every call. Here each weight is laid out
once, in oneDNN's own blocks. Sixteen rows then take about two thirds of the time; one row is faster as it was, so it
stays so.

The copy takes the weights' memory a second time, and holds what they were: the model must not change meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.nn import functional

_logger = logging.getLogger(__name__)

LEAST_ROWS = {torch.float32: 4, torch.bfloat16: 2}
"""From how many rows on the packed product is the faster one (measured on an AVX-512 processor with AMX)."""
_SHARE_OF_FREE_MEMORY = 0.5
_HINT_ROWS = 16
"""For how many rows oneDNN chooses the blocks."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}


class PackedLinears:
    """The packed weights of one model. `remove` gives the model back as it was."""

    def __init__(self, model: nn.Module, *, free_bytes: int) -> None:
        """Packs every plain linear layer on the processor, unless the copies would take over half of `free_bytes`, or
        this build of PyTorch has no such product."""
        self._modules: list[nn.Linear] = []
        found = [module for module in model.modules() if type(module) is nn.Linear and _can_be_packed(module)]
        num_bytes = sum(module.weight.numel() * module.weight.element_size() for module in found)
        if not found or num_bytes > _SHARE_OF_FREE_MEMORY * free_bytes or not _works(found[0].weight.dtype):
            return
        for module in found:
            vars(module)["forward"] = _packed_forward(module)  # found before the class's own
            self._modules.append(module)
        _logger.info("linear layers packed layers=%d mb=%d", len(found), num_bytes // 10**6)

    @property
    def num_layers(self) -> int:
        """How many layers are packed."""
        return len(self._modules)

    def remove(self) -> None:
        """Undo it."""
        for module in self._modules:
            del vars(module)["forward"]
        self._modules.clear()


def _can_be_packed(module: nn.Linear) -> bool:
    weight = module.weight
    return weight.device.type == "cpu" and weight.dtype in LEAST_ROWS and "forward" not in module.__dict__


def _works(dtype: torch.dtype) -> bool:
    """Whether the product is there and right; it is not part of PyTorch's promised interface."""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    rows = torch.randn(5, 32, generator=generator).to(dtype)
    try:
        with torch.inference_mode():
            packed = _product(weight, None)(rows)
    except (RuntimeError, AttributeError, NotImplementedError, TypeError) as error:
        _logger.info("linear layers stay unpacked: %s", str(error).splitlines()[0])
        return False
    return torch.allclose(packed, functional.linear(rows, weight), rtol=_TOLERANCE[dtype], atol=_TOLERANCE[dtype])


def _product(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _HINT_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda rows: multiply(rows, packed, bias, "none", [], "")


def _packed_forward(module: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    given = cast("torch.Tensor | None", module.bias)
    weight, bias = module.weight.detach(), given.detach() if given is not None else None
    product, least_rows, width = _product(weight, bias), LEAST_ROWS[weight.dtype], weight.shape[1]

    def forward(rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() < least_rows * width or rows.dtype != weight.dtype:
            return functional.linear(rows, weight, bias)
        return product(rows)

    return forward
