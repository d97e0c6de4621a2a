"""Computing a layer again in the backward pass instead of keeping what it saved, for as many layers as must be.

The first layers are the ones to recompute: the backward pass reaches them last, when the kept layers have already
given their memory back, so that what a recomputed layer needs for a moment costs no extra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from gym_trainer.fast.layers import decoder_layers, forwards_replaced


@contextmanager
def recomputed(model: nn.Module, num_layers: int) -> Iterator[None]:
    """The model with its first `num_layers` decoder layers recomputed.

    Raises:
        ValueError: the model has fewer layers.
    """
    layers = decoder_layers(model)
    if num_layers > len(layers):
        raise ValueError(f"the model has {len(layers)} decoder layers, fewer than the {num_layers} to recompute")
    forwards = {layer: partial(_checkpointed, layer, layer.forward, _is_random(layer)) for layer in layers[:num_layers]}
    with forwards_replaced(forwards):
        yield


def _checkpointed(
    layer: nn.Module, forward: Callable[..., Any], preserve_rng_state: bool, *args: Any, **kwargs: Any
) -> Any:
    if not layer.training:
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)


def _is_random(layer: nn.Module) -> bool:
    """Whether a second pass needs the first one's random state."""
    dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in layer.modules())
    return dropout or any(getattr(module, "attention_dropout", 0.0) for module in layer.modules())
