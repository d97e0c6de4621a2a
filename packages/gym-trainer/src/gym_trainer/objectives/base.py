"""What a method is to the loop: a summed loss, what it is divided by, and what it must know of the whole step.

The loop divides the sums of all micro-batches and ranks by one number, the objective's normaliser of the whole step.
So neither the micro-batch size, nor packing, nor the number of devices changes the loss or its gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

if TYPE_CHECKING:
    from gym_data import Prepared, Streamed, TokenStore
    from gym_sdk.events import EventWriter
    from gym_sdk.spec import RunSpec
    from gym_trainer.exporting.folder import Base
    from gym_trainer.loop.batch import MicroBatch, Row, RowSource, StepBatch
    from gym_trainer.loop.fit import FitSettings
    from gym_trainer.loop.forward import ForwardModel
    from gym_trainer.loop.step import StepRunner

Unit = Literal["token", "sequence", "pair"]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A metric as a numerator and a denominator, so that it adds up over micro-batches, ranks and steps."""

    total: Tensor
    count: Tensor

    @classmethod
    def mean(cls, values: Tensor) -> Ratio:
        """The mean of `values`, whatever their number."""
        return cls(values.detach().sum(), values.new_tensor(values.numel()))


@dataclass(frozen=True, slots=True)
class LossSum:
    """The loss of one micro-batch, summed over its units and not yet divided, with the graph behind it."""

    loss: Tensor
    metrics: dict[str, Ratio] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a method may use to get ready, before the first step and before a checkpoint is loaded."""

    model: ForwardModel
    """With the weights that training begins with, also in a run that is resumed."""
    runner: StepRunner
    settings: FitSettings
    run_path: Path
    events: EventWriter
    stack: ExitStack
    """Closed when the run's steps are done."""


class Objective(ABC):
    """One method of training. What it keeps follows from how the run begins: a resumed run must not miss anything."""

    unit: ClassVar[Unit]
    """What the loss is averaged over."""

    scores: tuple[str, ...] | None = None
    """The names of the numbers that the model gives for a sequence; None for a model that writes text."""

    def rows(self, store: TokenStore) -> RowSource:
        """The rows of a step, from prepared data."""
        from gym_trainer.loop.batch import StoreRows

        return StoreRows(store)

    def start(self, start: Start, rows: Sequence[RowSource]) -> list[RowSource]:
        """Get ready for training on `rows` (training, then evaluation); the rows to use, in the same order."""
        return list(rows)

    def resident_bytes(self, dtype: str) -> int:
        """Memory of the device that the method itself holds throughout, such as a teacher's, in a run of this dtype."""
        return 0

    def prepared_step(self, model: ForwardModel, step: StepBatch) -> StepBatch:
        """The step as it is trained on, such as with answers that the model writes now. Not called in evaluation."""
        return step

    def normaliser(self, step: StepBatch) -> float:
        """How many units this rank's rows of the step hold; the loop adds the ranks up and divides by the sum."""
        return float(step.num_trained_tokens if self.unit == "token" else len(step.rows))

    def statistics_rows(self, step: StepBatch) -> Sequence[Row]:
        """The rows that `statistics` sees."""
        return step.rows

    def statistics(self, model: ForwardModel, micro_batches: Iterator[MicroBatch]) -> dict[str, Ratio]:
        """What `loss` needs from the whole step before any gradient, such as KTO's reference point.

        Called without gradients, once a step; the loop adds the ranks up. A method that needs nothing leaves it.
        """
        return {}

    @abstractmethod
    def loss(self, model: ForwardModel, micro_batch: MicroBatch, statistics: dict[str, float]) -> LossSum:
        """The summed loss of one micro-batch."""

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics that are made of others, such as the difference of two means."""
        return {}


def build(spec: RunSpec, base: Base, prepared: Prepared | Streamed) -> Objective:
    """The objective of a specification's `method:` section; what is wrong with its inputs is found here.

    Raises:
        DataError: rows that the method cannot learn from.
        UserError: a teacher with another vocabulary.
    """
    from gym_data import Prepared
    from gym_sdk.spec import Classification, Cpo, Distillation, Dpo, Kto, Orpo, Pretrain, Reward, Sft, Simpo
    from gym_trainer.objectives.classes import Classes
    from gym_trainer.objectives.distillation import DistillationObjective, resolve_teacher
    from gym_trainer.objectives.dpo import DpoObjective
    from gym_trainer.objectives.kto import KtoObjective
    from gym_trainer.objectives.reference import Reference
    from gym_trainer.objectives.reference_free import CpoObjective, OrpoObjective, SimpoObjective
    from gym_trainer.objectives.scoring import ClassificationObjective, RewardObjective
    from gym_trainer.objectives.sft import SftObjective, require_text

    method = spec.method
    match method:
        case Sft():
            return SftObjective(loss_kind=method.loss, neftune_alpha=method.neftune_alpha)
        case Pretrain():
            require_text(prepared.report)
            return SftObjective()
        case Dpo():
            return DpoObjective(method, Reference.of(spec))
        case Kto():
            return KtoObjective(method, Reference.of(spec), seed=spec.seed)
        case Orpo():
            return OrpoObjective(method)
        case Simpo():
            return SimpoObjective(method)
        case Cpo():
            return CpoObjective(method)
        case Reward():
            return RewardObjective(method)
        case Classification():
            assert isinstance(prepared, Prepared), "a specification with classes does not stream"
            train = [source.source for source in spec.data.train]
            files = {"train": train, "eval": [source.source for source in spec.data.eval.sources] or train}
            return ClassificationObjective(Classes.of(method.labels, prepared.train, base.tokenizer, files))
        case Distillation():
            teacher = resolve_teacher(spec, base.resolved.folder)
            return DistillationObjective(method, teacher, stop_ids=tuple(base.renderer.stop_ids), seed=spec.seed)
        case _:
            raise AssertionError(f"no objective for {method.kind}")
