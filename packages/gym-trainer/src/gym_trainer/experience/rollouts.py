"""Attempts at questions with a library in the prompt, and their rewards."""

from __future__ import annotations

import asyncio
import hashlib
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gym_data.experience import ExperienceLibrary
from gym_sdk.spec.training_free import SamplingSpec
from gym_trainer.experience.budget import Purpose
from gym_trainer.experience.caller import Answer, Caller, ReplayMiss, in_order
from gym_trainer.experience.questions import Question
from gym_trainer.rewards import Reward, RewardTimeout


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One attempt. `reward` is None where there is no answer or no verdict; that is never a 0."""

    key: str
    text: str
    reward: float | None
    dropped: str | None = None
    """Why it does not count."""

    truncated: bool = False
    """The answer was cut off at its limit."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Attempts at one question."""

    question: Question
    rollouts: tuple[Rollout, ...]
    reference: str | None
    """What the rewards rest on: the row's answer, or the majority's."""

    @property
    def counted(self) -> tuple[Rollout, ...]:
        return tuple(rollout for rollout in self.rollouts if rollout.dropped is None)

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.counted if rollout.reward is not None]

    @property
    def has_contrast(self) -> bool:
        """Whether the attempts differ in reward: without that a group teaches nothing."""
        return len(set(self.rewards)) > 1


class Scorer:
    """Verifies answers, from the journal where a verdict is not repeatable."""

    def __init__(self, reward: Reward, caller: Caller, *, replay: bool = False) -> None:
        self._reward, self._journal, self._replay = reward, caller.journal, replay
        self._turn = asyncio.Lock()

    @property
    def all_or_nothing(self) -> bool:
        """Whether every reward is 0 or 1, so far as the reward says so."""
        return getattr(self._reward, "all_or_nothing", False)

    async def score(self, answer: Answer, reference: str, question: str) -> tuple[float | None, str | None]:
        """The reward, or None and why there is none. Raises RewardFailed."""
        value, why = await self._verdict(
            f"score\0{answer.key}\0{reference}", lambda: self._reward.score(answer.text, reference, question)
        )
        return (None if value is None else float(value)), why

    async def extract(self, answer: Answer) -> str | None:
        """The comparable part of an answer, for majority votes."""
        value, _ = await self._verdict(f"extract\0{answer.key}", lambda: self._reward.extract(answer.text))
        return None if value is None else str(value)

    async def _verdict(
        self, content: str, compute: Callable[[], float | str | None]
    ) -> tuple[float | str | None, str | None]:
        if self._reward.repeatable:
            return compute(), None
        key = hashlib.sha256(content.encode()).hexdigest()
        if (entry := self._journal.scores.get(key)) is not None:
            return entry.get("value"), entry.get("why")
        if self._replay:
            raise ReplayMiss("the journal holds no verdict for an answer")
        async with self._turn:
            try:
                value, why = await asyncio.to_thread(compute), None
            except RewardTimeout as error:
                value, why = None, error.message
        await self._journal.append({"type": "score", "key": key, "value": value, "why": why})
        return value, why


@dataclass(frozen=True, kw_only=True)
class Student:
    """The model under improvement, with everything needed to try it on questions."""

    caller: Caller
    scorer: Scorer
    ground_truth: Literal["answers", "majority", "critique"] = "answers"

    async def group(
        self, question: Question, library: ExperienceLibrary, sampling: SamplingSpec, *, size: int, draw: str
    ) -> Group:
        """`size` attempts at one question in training."""
        messages = library.place(question.messages)
        answers = await in_order(
            self.caller.ask("student", messages, sampling, draw=f"{draw}/{n}", purpose="training") for n in range(size)
        )
        reference = question.reference if self.ground_truth == "answers" else None
        if self.ground_truth == "majority":
            reference = await self._majority([answer for answer in answers if isinstance(answer, Answer)])
        rollouts = [await self._rollout(answer, question, reference) for answer in answers]
        return Group(question=question, rollouts=tuple(rollouts), reference=reference)

    async def attempt(
        self, group: Group, library: ExperienceLibrary, sampling: SamplingSpec, *, draw: str
    ) -> float | None:
        """The reward of one more attempt at a group's question, with another library."""
        messages = library.place(group.question.messages)
        answer = await self.caller.ask("student", messages, sampling, draw=draw, purpose="training")
        return (await self._rollout(answer, group.question, group.reference)).reward

    async def rewards(
        self,
        library: ExperienceLibrary,
        questions: Sequence[Question],
        sampling: SamplingSpec,
        *,
        samples: int,
        split: str,
        purpose: Purpose,
        on_question: Callable[[], None] = lambda: None,
    ) -> list[float | None]:
        """The mean reward of each question; None where no attempt counts.

        The draws depend on split and sample alone, so that two libraries meet the same seeds: a paired comparison.
        """

        async def one(question: Question) -> float | None:
            messages = library.place(question.messages)
            answers = await in_order(
                self.caller.ask("student", messages, sampling, draw=f"{split}/{n}", purpose=purpose)
                for n in range(samples)
            )
            rollouts = [await self._rollout(answer, question, question.reference) for answer in answers]
            on_question()
            found = [rollout.reward for rollout in rollouts if rollout.reward is not None]
            return statistics.fmean(found) if found else None

        return await in_order(one(question) for question in questions)

    async def _rollout(self, answer: object, question: Question, reference: str | None) -> Rollout:
        if not isinstance(answer, Answer):
            return Rollout(key=answer.key, text="", reward=None, dropped=answer.why)  # pyright: ignore[reportAttributeAccessIssue]
        rollout = Rollout(key=answer.key, text=answer.text, reward=None, truncated=answer.finish_reason == "length")
        if reference is None:
            return rollout
        reward, why = await self.scorer.score(answer, reference, question.text)
        return replace(rollout, reward=reward, dropped=why)

    async def _majority(self, answers: Sequence[Answer]) -> str | None:
        """The answer that more than one attempt gives, and no other as often."""
        votes = Counter([value for answer in answers if (value := await self.scorer.extract(answer)) is not None])
        ranked = votes.most_common(2)
        if not ranked or ranked[0][1] < 2 or (len(ranked) > 1 and ranked[1][1] == ranked[0][1]):
            return None
        return ranked[0][0]
