"""What a method is to the loop: a summed loss, what it is divided by, and what it must know of the whole step.

The loop divides the sums of all micro-batches and ranks by one number, the objective's normaliser of the whole step.
So neither the micro-batch size, nor packing, nor the number of devices changes the loss or its gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

if TYPE_CHECKING:
    from gym_trainer.loop.batch import MicroBatch, StepBatch
    from gym_trainer.loop.forward import ForwardModel

Unit = Literal["token", "sequence", "pair"]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A metric as a numerator and a denominator, so that it adds up over micro-batches, ranks and steps."""

    total: Tensor
    count: Tensor


@dataclass(frozen=True, slots=True)
class LossSum:
    """The loss of one micro-batch, summed over its units and not yet divided, with the graph behind it."""

    loss: Tensor
    metrics: dict[str, Ratio] = field(default_factory=dict)


class Objective(ABC):
    """One method of training. Stateless between steps: a resumed run must not miss anything it kept."""

    unit: ClassVar[Unit]
    """What the loss is averaged over."""

    @abstractmethod
    def normaliser(self, step: StepBatch) -> float:
        """How many units this rank's rows of the step hold; the loop adds the ranks up and divides by the sum."""

    def statistics(self, model: ForwardModel, micro_batches: Iterator[MicroBatch]) -> dict[str, Ratio]:
        """What `loss` needs from the whole step before any gradient, such as KTO's reference point.

        Called without gradients, once a step; the loop adds the ranks up. A method that needs nothing leaves it.
        """
        return {}

    @abstractmethod
    def loss(self, model: ForwardModel, micro_batch: MicroBatch, statistics: dict[str, float]) -> LossSum:
        """The summed loss of one micro-batch."""


def build(method: Any) -> Objective:
    """The objective of a `method:` section, by its kind."""
    from gym_trainer.objectives.sft import SftObjective

    if method.kind == "sft":
        return SftObjective()
    raise AssertionError(f"no objective for {method.kind}")
