"""The fast path of a plan, put on a model for as long as a run lasts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import nn

from gym_trainer.fast.recompute import recomputed


@dataclass(frozen=True, kw_only=True)
class FastPath:
    """Which transforms are on. None of them changes what the model computes."""

    lean_lora: bool = True
    """LoRA's small products in the model's precision, where the layers allow it."""
    fused: bool = False
    """Each decoder layer's forward and backward written out; wins over `compile`."""
    compile: bool = False
    """Each decoder layer compiled."""
    recompute_layers: int = 0
    """How many of the first decoder layers are computed again in the backward pass."""
    offload: bool = False
    """The inputs of recomputed layers wait in host memory; of fused layers only."""
    loss_chunk_size: int | None = None
    """Rows of logits held at once; chosen by the vocabulary when None."""

    def with_recompute(self, num_layers: int) -> FastPath:
        return dataclasses.replace(self, recompute_layers=num_layers)


@contextmanager
def applied(
    model: nn.Module, fast: FastPath, on_problem: Callable[[str], None] = lambda reason: None
) -> Iterator[None]:
    """The model with the transforms on, and as it was afterwards.

    `on_problem` hears why layers that were to be fused are not; they are recomputed or compiled as they would be then.
    """
    with ExitStack() as stack:
        fused = fast.fused and _enter_fused(stack, model, fast, on_problem)
        if fast.lean_lora:
            from gym_trainer.fast.lora import lean_lora

            stack.enter_context(lean_lora(model))
        if fast.compile and not fused:
            from gym_trainer.fast.compile import compiled_layers

            stack.enter_context(compiled_layers(model, fast.recompute_layers))
        elif fast.recompute_layers and not fused:
            stack.enter_context(recomputed(model, fast.recompute_layers))
        yield


def _enter_fused(stack: ExitStack, model: nn.Module, fast: FastPath, on_problem: Callable[[str], None]) -> bool:
    from gym_trainer.fast.fused.apply import LayersDiffer, fused_layers

    try:
        stack.enter_context(fused_layers(model, fast.recompute_layers, offload=fast.offload))
    except LayersDiffer as error:
        on_problem(error.message)
        return False
    return True
