"""The teacher's part: summaries, lessons from the contrast inside a group, consolidation of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from gym_data.experience import ExperienceLibrary
from gym_sdk.spec.training_free import TrainingFreeGrpo
from gym_trainer.experience import prompts
from gym_trainer.experience.budget import Purpose
from gym_trainer.experience.caller import Answer, Caller, in_order
from gym_trainer.experience.lessons import Malformed, Operation, Reading, read_operations, read_used, with_sources
from gym_trainer.experience.rollouts import Group, Rollout

LONG_ATTEMPT_CHARACTERS = 2000
"""From here on `summaries: auto` has an attempt summarised."""


@dataclass
class Tally:
    """What did not work out, by name; it stands in the report."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, amount: int = 1) -> None:
        if amount:
            self.counts[name] += amount


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """An operation that one group proposes."""

    operation: Operation
    group: Group


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """Writes lessons. Everything it learns of a question is in the messages."""

    caller: Caller
    method: TrainingFreeGrpo
    tally: Tally

    async def criticise(
        self, group: Group, library: ExperienceLibrary, *, draw: str
    ) -> tuple[list[Proposal], list[tuple[str, bool]]]:
        """Lessons of a group, and for each experience that an attempt followed whether that attempt was right."""
        used: list[tuple[str, bool]] = []
        shown: list[tuple[str, str | None]] = []
        summaries = await in_order(
            self._summary(group, rollout, library, draw=f"{draw}/summary/{number}")
            for number, rollout in enumerate(group.counted)
        )
        for rollout, summary in zip(group.counted, summaries, strict=True):
            if summary is not None and rollout.reward is not None:
                used += [(item_id, rollout.reward >= 0.5) for item_id in read_used(summary, library)]
            shown.append((summary if summary is not None else rollout.text, verdict_of(rollout)))
        messages = prompts.critique_messages(
            group.question.text,
            shown,
            library=library,
            reference=group.reference,
            max_operations=self.method.lessons_per_question,
            max_words=self.method.library.max_item_words,
            by_majority=self.method.ground_truth == "majority",
            wording=self.method.prompts.critique,
        )
        reading = await self._operations(
            messages, library, draw=f"{draw}/critique", max_operations=self.method.lessons_per_question
        )
        source = (group.question.id,)
        return [
            Proposal(operation=with_sources(operation, source), group=group) for operation in reading.operations
        ], used

    async def consolidate(
        self, proposals: Sequence[Proposal], library: ExperienceLibrary, *, draw: str
    ) -> list[Operation]:
        """One list of operations from a batch's proposals, each with the questions that it rests on."""
        changes = [proposal for proposal in proposals if proposal.operation.op != "keep"]
        if not changes:
            return []
        # Sorted by content: the prompt is the same whatever the order in which the groups came in.
        changes.sort(key=lambda p: (p.group.question.id, p.operation.sort_key))
        shown = [proposal.operation.shown(library) for proposal in changes]
        max_words = self.method.library.max_item_words
        wording = self.method.prompts.consolidation
        messages = prompts.consolidation_messages(shown, library=library, max_words=max_words, wording=wording)
        reading = await self._operations(messages, library, draw=f"{draw}/consolidate", max_operations=None)
        return [
            with_sources(operation, _sources(operation, numbers, changes))
            for operation, numbers in zip(reading.operations, reading.origins, strict=True)
        ]

    async def write_tips(
        self, examples: Sequence[tuple[str, str | None]], *, max_tips: int, purpose: Purpose
    ) -> list[Operation]:
        """The baseline: lessons written from questions and answers, without attempts."""
        messages = prompts.tips_messages(examples, max_tips=max_tips, max_words=self.method.library.max_item_words)
        empty = ExperienceLibrary()
        reading = await self._operations(messages, empty, draw="tips", max_operations=max_tips, purpose=purpose)
        return [operation for operation in reading.operations if operation.op == "add"]

    async def _summary(self, group: Group, rollout: Rollout, library: ExperienceLibrary, *, draw: str) -> str | None:
        mode = self.method.summaries
        if mode == "never" or (mode == "auto" and len(rollout.text) <= LONG_ATTEMPT_CHARACTERS):
            return None
        messages = prompts.summary_messages(
            group.question.text,
            rollout.text,
            library=library,
            verdict=verdict_of(rollout),
            reference=group.reference,
            by_majority=self.method.ground_truth == "majority",
            wording=self.method.prompts.summary,
        )
        answer = await self.caller.ask("teacher", messages, self.method.updater, draw=draw, purpose="training")
        if not isinstance(answer, Answer):
            self.tally.add("summaries dropped: no answer")
            return None
        return answer.text

    async def _operations(
        self,
        messages: list[prompts.Message],
        library: ExperienceLibrary,
        *,
        draw: str,
        max_operations: int | None,
        purpose: Purpose = "training",
    ) -> Reading:
        """Ask, and ask once more when the answer cannot be used; what cannot be used then is dropped and counted."""
        answer = await self.caller.ask("teacher", messages, self.method.updater, draw=draw, purpose=purpose)
        if not isinstance(answer, Answer):
            self.tally.add("teacher answers dropped: no answer")
            return EMPTY
        max_words = self.method.library.max_item_words
        reading, problem = _try_read(answer.text, library, max_words, max_operations)
        if problem is None:
            return reading
        self.tally.add("teacher answers sent back for repair")
        again = prompts.repair_messages(messages, answer.text, problem)
        repaired = await self.caller.ask("teacher", again, self.method.updater, draw=f"{draw}/repair", purpose=purpose)
        if isinstance(repaired, Answer):
            second, problem = _try_read(repaired.text, library, max_words, max_operations)
            if problem is None:
                return second
            # The better of both: a repair may break what was whole.
            reading = max((reading, second), key=lambda each: len(each.operations))
        if reading is EMPTY:
            self.tally.add("teacher answers dropped: malformed after repair")
        self.tally.add("operations dropped: malformed after repair", len(reading.problems))
        return reading


EMPTY: Reading = Reading(operations=(), origins=(), problems=())


def verdict_of(rollout: Rollout) -> str | None:
    """How a teacher is told an attempt's reward."""
    if rollout.reward is None:
        return None
    return {0.0: "wrong", 1.0: "correct"}.get(rollout.reward, f"reward {rollout.reward:.2f} of 1")


def _try_read(
    text: str, library: ExperienceLibrary, max_words: int, max_operations: int | None
) -> tuple[Reading, str | None]:
    try:
        reading = read_operations(text, library, max_words=max_words, max_operations=max_operations)
    except Malformed as problem:
        return EMPTY, str(problem)
    return reading, " ".join(reading.problems) or None


def _sources(operation: Operation, numbers: Sequence[int], proposals: Sequence[Proposal]) -> list[str]:
    """The questions behind a consolidated operation: of the proposals that it names or repeats, else of all."""
    named = [proposals[number - 1] for number in numbers if 1 <= number <= len(proposals)]
    if not named:
        alike = (operation.op, operation.target, operation.text)
        named = [p for p in proposals if (p.operation.op, p.operation.target, p.operation.text) == alike]
    return [proposal.group.question.id for proposal in named or proposals]
