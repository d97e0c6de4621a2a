"""What an optimizer keeps for the weights that it moves, counted from their shapes.

Each rule is the library's own: which tensors its first step makes, of which dtype (`tests/test_optimizer_states.py`
takes that step and counts). Legend: a matrix of M rows and N columns, R the rank of a projection.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from torch import nn

from gym_trainer.loop.matrices import hidden_matrices

if TYPE_CHECKING:
    from torch import Tensor

_LIKE_WEIGHT = {"adamw": 2, "sgd": 0, "schedule_free_adamw": 2, "schedule_free_sgd": 1}
"""Tensors of the weight's own dtype and size."""

_BITSANDBYTES = {
    "adamw_8bit": (2, 8),
    "paged_adamw_8bit": (2, 8),
    "paged_adamw_32bit": (2, 32),
    "lion_8bit": (1, 8),
    "lion_32bit": (1, 32),
    "ademamix_8bit": (3, 8),
    "ademamix": (3, 32),
}
"""Numbers a weight, and their bits."""
_TORCHAO_BITS = {"adamw_torch_8bit": 8, "adamw_torch_4bit": 4}
_PROJECTED = ("galore_adamw", "apollo_adamw")

_BLOCK = 256
"""Weights that share a scale in 8 and 4 bits: of bitsandbytes, and what transformers asks torchao for."""
_FEWEST_IN_BLOCKS = 4096
"""Smaller tensors keep their states unquantized."""
_FEWEST_PAGED = 100_000
"""Smaller tensors are not paged."""
_PROJECTION_RANK = 128
"""transformers' default for GaLore and APOLLO."""


def state_sizes(optimizer: str, model: nn.Module, *, on_cuda: bool = False) -> Iterator[int]:
    """Bytes of each tensor that the optimizer keeps on the device beside the trained weights of `model`.

    Paged states count for nothing on a card: the driver moves them to host memory when the device is full, so that
    they never decide whether a run fits. A processor has no paging, and holds them.
    """
    return chain.from_iterable(sizes for _, sizes in sizes_by_weight(optimizer, model, on_cuda=on_cuda))


def sizes_by_weight(
    optimizer: str, model: nn.Module, *, on_cuda: bool = False
) -> Iterator[tuple[nn.Parameter, list[int]]]:
    """The same for each trained weight, in the model's order."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer in _LIKE_WEIGHT:
        sizes = [[parameter.nbytes] * _LIKE_WEIGHT[optimizer] for parameter in trained]
    elif optimizer == "adafactor":
        sizes = [_adafactor(parameter) for parameter in trained]
    elif optimizer == "muon":
        matrices = {id(parameter) for parameter in hidden_matrices(model)}
        sizes = [[parameter.nbytes] * (1 if id(parameter) in matrices else 2) for parameter in trained]
    elif optimizer in _BITSANDBYTES:
        in_32_bits = _weights_of(model, nn.Embedding)  # transformers asks for it: rare tokens' states round badly
        paged = optimizer.startswith("paged_") and on_cuda
        sizes = [
            []
            if paged and parameter.numel() >= _FEWEST_PAGED
            else _bitsandbytes(parameter, *_BITSANDBYTES[optimizer], whole=id(parameter) in in_32_bits)
            for parameter in trained
        ]
    elif optimizer in _TORCHAO_BITS:
        sizes = [_torchao(parameter, _TORCHAO_BITS[optimizer]) for parameter in trained]
    else:
        assert optimizer in _PROJECTED, optimizer
        linear = _weights_of(model, nn.Linear)
        sizes = [
            _projected(parameter, optimizer) if id(parameter) in linear else [parameter.nbytes] * 2
            for parameter in trained
        ]
    return zip(trained, sizes, strict=True)


def _adafactor(weight: Tensor) -> list[int]:
    """Second moments by row and by column, in float32 whatever the weight's dtype; no first moment."""
    if weight.ndim < 2:
        return [4 * weight.numel()]
    outer = math.prod(weight.shape[:-2])
    return [4 * outer * weight.shape[-2], 4 * outer * weight.shape[-1]]


def _bitsandbytes(weight: Tensor, num_states: int, bits: int, *, whole: bool) -> list[int]:
    if bits == 32 or whole or weight.numel() < _FEWEST_IN_BLOCKS:
        return [4 * weight.numel()] * num_states
    return [weight.numel(), 4 * math.ceil(weight.numel() / _BLOCK)] * num_states


def _torchao(weight: Tensor, bits: int) -> list[int]:
    """Each of the two states has a table of its own of the values that its codes mean."""
    if weight.numel() < _FEWEST_IN_BLOCKS or weight.numel() % _BLOCK:
        return [weight.nbytes] * 2
    return [weight.numel() * bits // 8, 4 * (weight.numel() // _BLOCK), 4 * 2**bits] * 2


def _projected(weight: Tensor, optimizer: str) -> list[int]:
    """Two moments of the gradient projected along its shorter side, and the projection: R by that side."""
    longer, shorter = max(weight.shape), min(weight.shape)
    # GaLore's directions are singular vectors, of which there are no more than the shorter side has entries
    rank = min(_PROJECTION_RANK, shorter) if optimizer == "galore_adamw" else _PROJECTION_RANK
    moment, projection = (side * rank * weight.element_size() for side in (longer, shorter))
    return [moment, moment, projection]


def _weights_of(model: nn.Module, kind: type[nn.Module]) -> set[int]:
    """Weights of modules of this kind, by identity. A tied weight belongs to the module that has it first."""
    named = {name: id(parameter) for name, parameter in model.named_parameters()}
    names = (f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kind))
    return {named[name] for name in names if name in named}
