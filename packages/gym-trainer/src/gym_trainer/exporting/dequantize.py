"""The weights that a quantized base really computes with, in full precision.

An adapter that was trained beside a quantized base has learned to make up for its rounding. Added into the weights
from before quantization it would say something else: the sum has to be made with the rounded ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn


@torch.no_grad()
def copy_dequantized(quantized: nn.Module, plain: nn.Module) -> int:
    """Put every quantized weight of the one model, dequantized, into the same place of the other; returns how many."""
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight
    from transformers.pytorch_utils import Conv1D

    count = 0
    for name, module in quantized.named_modules():
        weight: Any = getattr(module, "weight", None)
        if type(weight).__name__ not in ("Params4bit", "Int8Params"):
            continue
        values = dequantize_bnb_weight(weight, state=getattr(module, "state", None))
        target: Any = plain.get_submodule(name)
        if isinstance(target, Conv1D):  # quantized as the linear layer that it is, transposed
            values = values.T
        target.weight.copy_(values)
        count += 1
    return count
