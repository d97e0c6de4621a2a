"""The fast path of a plan, put on a model for as long as a run lasts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import nn

from gym_trainer.fast.recompute import recomputed


@dataclass(frozen=True, kw_only=True)
class FastPath:
    """Which transforms are on. None of them changes what the model computes."""

    lean_lora: bool = True
    """LoRA's small products in the model's precision, where the layers allow it."""
    compile: bool = False
    """Each decoder layer compiled."""
    recompute_layers: int = 0
    """How many of the first decoder layers are computed again in the backward pass."""
    loss_chunk_size: int | None = None
    """Rows of logits held at once; chosen by the vocabulary when None."""

    def with_recompute(self, num_layers: int) -> FastPath:
        return dataclasses.replace(self, recompute_layers=num_layers)


@contextmanager
def applied(model: nn.Module, fast: FastPath) -> Iterator[None]:
    """The model with the transforms on, and as it was afterwards."""
    with ExitStack() as stack:
        if fast.lean_lora:
            from gym_trainer.fast.lora import lean_lora

            stack.enter_context(lean_lora(model))
        if fast.compile:
            from gym_trainer.fast.compile import compiled_layers

            stack.enter_context(compiled_layers(model, fast.recompute_layers))
        elif fast.recompute_layers:
            stack.enter_context(recomputed(model, fast.recompute_layers))
        yield
