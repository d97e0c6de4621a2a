"""The loop of training-free GRPO: attempts, lessons, a candidate library, the gate.

    for each epoch, for each batch of questions
        sample a group of attempts at each question, with the working library in the prompt
        keep the groups with a contrast; the teacher proposes operations from each
        the teacher consolidates the proposals; each operation is tried on its own questions
        those that stand are applied, in sorted order, to the working library
        the gate accepts the working library, or leaves it waiting for more evidence

Everything is a function of the specification and of the answers: the order in which answers arrive has no effect.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gym_data.experience import ExperienceLibrary
from gym_sdk.spec.training_free import TrainingFreeGrpo
from gym_trainer.experience.budget import BudgetExhausted
from gym_trainer.experience.caller import Caller, in_order
from gym_trainer.experience.critique import Proposal, Tally, Teacher
from gym_trainer.experience.evaluation import paired
from gym_trainer.experience.gate import AlphaSpending, Gate, GateResult
from gym_trainer.experience.lessons import Operation
from gym_trainer.experience.provenance import Provenance
from gym_trainer.experience.questions import Question, Splits, epoch_order
from gym_trainer.experience.rollouts import Group, Student
from gym_trainer.experience.updates import Update, apply


@dataclass(kw_only=True)
class StepRecord:
    """What one batch, or the pruning, came to."""

    step: int
    epoch: int
    kind: str = "batch"
    num_questions: int = 0
    num_groups_kept: int = 0
    mean_reward: float | None = None
    num_attempts_dropped: int = 0
    num_attempts_truncated: int = 0
    num_proposals: int = 0
    applied: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    gate: dict[str, Any] | None = None
    accepted: bool = False
    library_sha256: str = ""
    num_items: int = 0
    num_items_waiting: int = 0
    """In the working library, not accepted yet."""

    num_tokens: int = 0


@dataclass(kw_only=True)
class Optimiser:
    """Improves a library. `run` may end early on a used-up budget; what was accepted by then stands."""

    method: TrainingFreeGrpo
    splits: Splits
    library: ExperienceLibrary
    """The accepted library: the best that the gate has seen."""

    student: Student
    teacher: Teacher
    caller: Caller
    seed: int
    on_step: Callable[[StepRecord], None] = lambda record: None
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None

    provenance: Provenance = field(default_factory=Provenance)
    tally: Tally = field(default_factory=Tally)
    history: list[StepRecord] = field(default_factory=list)
    versions: list[ExperienceLibrary] = field(default_factory=list)
    """Every accepted library, the initial one first."""

    stopped_by: str | None = None
    """The cap that ended the run early."""

    _gate: Gate = field(init=False)
    _gate_order: list[Question] = field(init=False)
    _questions: dict[str, Question] = field(init=False)
    _working: ExperienceLibrary = field(init=False)
    """The accepted library and the operations that still lack evidence."""

    _waited: int = field(init=False, default=0)
    """Batches since the working library has parted from the accepted one."""

    _accepted_rewards: list[float] = field(init=False, default_factory=list)
    """The rewards of the last batch under the accepted library."""

    def __post_init__(self) -> None:
        self.provenance.begin(self.library)
        self.versions.append(self.library)
        batches = math.ceil(len(self.splits.train) / self.method.batch_size) * self.method.epochs
        tests = batches + self.method.pruning.enabled
        self._gate = Gate(
            num_questions=len(self.splits.gate),
            delta=self.method.gate.delta,
            spending=AlphaSpending(total=1.0 - self.method.gate.confidence, planned=tests),
            all_or_nothing=self.student.scorer.all_or_nothing and self.method.gate.samples == 1,
        )
        self._gate_order = list(self.splits.gate)
        random.Random(f"gate/{self.seed}").shuffle(self._gate_order)
        self._questions = {question.id: question for question in self.splits.train}
        self._working = self.library

    async def run(self) -> ExperienceLibrary:
        """All epochs; the library that was accepted last."""
        step = 0
        batches = math.ceil(len(self.splits.train) / self.method.batch_size)
        try:
            for epoch in range(self.method.epochs):
                order = epoch_order(self.splits.train, self.seed, epoch)
                for number in range(batches):
                    step += 1
                    batch = order[number * self.method.batch_size : (number + 1) * self.method.batch_size]
                    await self._batch(step, epoch, batch)
                    self.on_progress("train", step, batches * self.method.epochs)
            if self.method.pruning.enabled:
                await self._prune(step + 1)
        except BudgetExhausted as stop:
            self.stopped_by = stop.limit
        return self.library

    async def _batch(self, step: int, epoch: int, batch: Sequence[Question]) -> None:
        record = StepRecord(step=step, epoch=epoch, num_questions=len(batch))
        groups = await self._attempt_all(record, batch)
        if self._is_worse(groups):
            # The waiting operations do harm on training questions: back to what was accepted.
            self.tally.add("working libraries rolled back")
            self._roll_back()
            groups = await self._attempt_all(record, batch)
        if self._working.sha256 == self.library.sha256:
            self._accepted_rewards = [reward for group in groups for reward in group.rewards]
        kept = [group for group in groups if self._teaches(group)]
        record.num_groups_kept = len(kept)
        self.tally.add("groups skipped: all attempts alike", len(groups) - len(kept))

        lessons = await in_order(
            self.teacher.criticise(group, self._working, draw=f"teach/{step}/{group.question.id}") for group in kept
        )
        proposals = [proposal for found, _ in lessons for proposal in found]
        record.num_proposals = len(proposals)
        self._count(proposals, [use for _, used in lessons for use in used])
        operations = await self.teacher.consolidate(proposals, self._working, draw=f"teach/{step}")
        if self.method.gate.has_trial:
            operations = await self._trial(record, operations, groups)
        await self.caller.settle_failures()
        await self._change(record, operations, groups)

    async def _attempt_all(self, record: StepRecord, batch: Sequence[Question]) -> list[Group]:
        groups = await in_order(
            self.student.group(
                question,
                self._working,
                self.method.rollout,
                size=self.method.group_size,
                draw=f"train/{record.epoch}",
            )
            for question in batch
        )
        rewards = [reward for group in groups for reward in group.rewards]
        dropped = sum(rollout.dropped is not None for group in groups for rollout in group.rollouts)
        truncated = sum(rollout.truncated for group in groups for rollout in group.rollouts)
        record.mean_reward = statistics.fmean(rewards) if rewards else None
        record.num_attempts_dropped += dropped
        record.num_attempts_truncated += truncated
        self.tally.add("attempts dropped", dropped)
        self.tally.add("attempts cut off at max_tokens", truncated)
        return groups

    def _is_worse(self, groups: Sequence[Group]) -> bool:
        """Whether the working library does worse on this batch than the accepted one did on its last batch.

        Two standard errors of the difference, on training questions only: nothing of the gate is used up.
        """
        if self._working.sha256 == self.library.sha256 or len(self._accepted_rewards) < 2:
            return False
        now = [reward for group in groups for reward in group.rewards]
        if len(now) < 2:
            return False
        error = math.sqrt(
            statistics.variance(now) / len(now)
            + statistics.variance(self._accepted_rewards) / len(self._accepted_rewards)
        )
        return statistics.fmean(now) < statistics.fmean(self._accepted_rewards) - 2 * error

    def _roll_back(self) -> None:
        self._working, self._waited = self.library, 0

    async def _trial(
        self, record: StepRecord, operations: Sequence[Operation], groups: Sequence[Group]
    ) -> list[Operation]:
        """The operations that, each applied alone, do not lower the reward on the questions they were drawn from.

        The groups before are the other arm, so a trial costs a few attempts. It favours an operation's own questions;
        whether it helps elsewhere is for the held-out questions to say.
        """
        by_id = {group.question.id: group for group in groups}

        async def survives(operation: Operation) -> bool:
            sources = [by_id[source] for source in operation.sources if source in by_id and by_id[source].rewards]
            library = self._apply([operation]).library
            if operation.op == "keep" or not sources or library.sha256 == self._working.sha256:
                return True
            chosen = [sources[number % len(sources)] for number in range(self.method.gate.trial_attempts)]
            tried = await in_order(
                self.student.attempt(group, library, self.method.rollout, draw=f"trial/{record.step}/{number}")
                for number, group in enumerate(chosen)
            )
            if operation.op in ("add", "update"):
                for reward in tried:
                    if reward is not None:
                        self.provenance.count(operation.item().id, helped=reward >= 0.5)
            gains = [
                reward - statistics.fmean(group.rewards)
                for reward, group in zip(tried, chosen, strict=True)
                if reward is not None
            ]
            return sum(gains) >= 0

        stands = await in_order(survives(operation) for operation in operations)
        failed = [operation for operation, stood in zip(operations, stands, strict=True) if not stood]
        record.refused += [{**operation.to_json(), "why": "it lowered the reward in its trial"} for operation in failed]
        self.tally.add("operations that failed their trial", len(failed))
        return [operation for operation, stood in zip(operations, stands, strict=True) if stood]

    async def _prune(self, step: int) -> None:
        """Leave out the items without which training questions go better, if the gate agrees."""
        self._roll_back()
        if not self.library.items:
            return
        record = StepRecord(step=step, epoch=self.method.epochs - 1, kind="pruning")
        chosen = epoch_order(self.splits.train, self.seed, self.method.epochs)[: self.method.pruning.questions]
        record.num_questions = len(chosen)

        async def rewards(library: ExperienceLibrary) -> list[float | None]:
            return await self.student.rewards(
                library, chosen, self.method.evaluation, samples=1, split="prune", purpose="training"
            )

        whole = await rewards(self.library)
        parts = await in_order(rewards(self.library.without(item.id)) for item in self.library.items)
        operations = [
            Operation(op="delete", target=item.id)
            for item, part in zip(self.library.items, parts, strict=True)
            if _is_gain(paired(part, whole))
        ]
        await self.caller.settle_failures()
        await self._change(record, operations, ())

    async def _change(self, record: StepRecord, operations: Sequence[Operation], groups: Sequence[Group]) -> None:
        """Apply operations to the working library, let the gate decide on it, and record what became of them."""
        update = self._apply(operations)
        changes = [operation for operation in update.applied if operation.op != "keep"]
        self._working = update.library
        if update.library.sha256 != self.library.sha256 and changes:
            result = await self._decide(update.library)
            if result is not None:
                record.gate = asdict(result)
            if result is None or result.accepted:
                record.accepted = True
                self.library = update.library
                self.versions.append(update.library)
                self._waited = 0
            else:
                self._waited += 1
                if self._waited > self.method.gate.patience:
                    self.tally.add("working libraries given up")
                    self._roll_back()
        else:
            self._gate.spending.skip()
        record.applied = [operation.to_json() for operation in changes]
        record.refused += [{**refused.operation.to_json(), "why": refused.why} for refused in update.refused]
        record.evicted = list(update.evicted)
        record.library_sha256 = self.library.sha256
        record.num_items = len(self.library.items)
        record.num_tokens = self.library.num_tokens_estimate
        record.num_items_waiting = len({i.id for i in self._working.items} - {i.id for i in self.library.items})
        self.provenance.record(record.step, changes, groups)
        self.tally.add("operations refused: duplicates, leaks and conflicts", len(update.refused))
        self.history.append(record)
        self.on_step(record)

    def _apply(self, operations: Sequence[Operation]) -> Update:
        return apply(
            self._working,
            operations,
            limits=self.method.library,
            questions=self._questions,
            usefulness=self.provenance.usefulness(),
        )

    async def _decide(self, candidate: ExperienceLibrary) -> GateResult | None:
        """The gate's verdict; None where it is off and everything is accepted."""
        if not self.method.gate.has_test:
            return None

        async def scores(positions: Sequence[int]) -> list[tuple[float, float]]:
            questions = [self._gate_order[position] for position in positions]
            current, then = await in_order(
                self.student.rewards(
                    library,
                    questions,
                    self.method.evaluation,
                    samples=self.method.gate.samples,
                    split="gate",
                    purpose="training",
                )
                for library in (self.library, candidate)
            )
            await self.caller.settle_failures()
            return [(a, b) for a, b in zip(current, then, strict=True) if a is not None and b is not None]

        return await self._gate.decide(scores)

    def _teaches(self, group: Group) -> bool:
        if self.method.ground_truth == "critique":
            return len(group.counted) > 0
        if self.method.group_size == 1:
            return len(group.rewards) > 0
        return group.has_contrast

    def _count(self, proposals: Sequence[Proposal], used: Sequence[tuple[str, bool]]) -> None:
        for item_id, right in used:
            self.provenance.count(item_id, helped=right)
        for proposal in proposals:
            operation = proposal.operation
            if operation.target is not None and operation.op in ("keep", "delete"):
                self.provenance.count(operation.target, helped=operation.op == "keep")


def _is_gain(differences: Sequence[float]) -> bool:
    """Whether a mean difference lies more than one standard error above 0: worth a test, no proof."""
    if len(differences) < 2:
        return False
    return statistics.fmean(differences) > statistics.stdev(differences) / math.sqrt(len(differences)) > 0
