"""The decoder layers of a model: what the fast path works on, one at a time and never class-wide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The text decoder's layers in order, or [] where transformers does not mark any as layers."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder = causal.get_decoder() if hasattr(causal, "get_decoder") else causal
    lists = [
        module
        for module in decoder.modules()
        if isinstance(module, nn.ModuleList)
        and len(module) > 0
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    ]
    return list(max(lists, key=len, default=[]))


@contextmanager
def forwards_replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """These very modules with other forwards. Their classes stay as they are, and so do they afterwards."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward
