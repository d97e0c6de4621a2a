"""What a library is worth, on test questions that nothing in the loop has seen.

Every library meets the same questions with the same seeds, so that differences are paired. Beside nothing at all stand
two baselines of the library's own length: a placebo (general advice, the same number of tokens in the same place) and
tips (lessons that the teacher writes from questions and answers, without attempts and so without contrast).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gym_data.experience import Experience, ExperienceLibrary
from gym_sdk.spec.training_free import TrainingFreeGrpo
from gym_trainer.experience.budget import BudgetExhausted
from gym_trainer.experience.caller import in_order
from gym_trainer.experience.critique import Teacher
from gym_trainer.experience.questions import Question
from gym_trainer.experience.rollouts import Student
from gym_trainer.experience.statistics import paired_interval, wilson_interval

MAX_TIP_EXAMPLES = 40
"""Training questions that the tips are written from: about as many as a teacher reads in one prompt."""

_ADVICE = (
    "Read the question twice before you begin.",
    "Stay calm and take the time that you need.",
    "Work in small steps and keep your notes tidy.",
    "Make sure that you understand what is being asked.",
    "Think about the question from more than one side.",
    "Write clearly, so that others can follow you.",
    "Look over your work once more before you finish.",
    "Do not give up when a question looks hard at first.",
    "Keep the whole picture in mind while you work on the parts.",
    "Trust your knowledge and use it with care.",
    "Good answers come from good habits, so practise them.",
    "Pay attention to every word that you are given.",
)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One library on the test questions."""

    name: str
    rewards: tuple[float | None, ...]
    num_items: int
    num_tokens: int

    @property
    def known(self) -> list[float]:
        return [reward for reward in self.rewards if reward is not None]

    def to_json(self, nothing: Arm | None) -> dict[str, Any]:
        """Accuracy with its interval, and the paired difference to the arm without a library."""
        known = self.known
        accuracy = statistics.fmean(known) if known else 0.0
        data: dict[str, Any] = {
            "name": self.name,
            "num_questions": len(known),
            "num_without_reward": len(self.rewards) - len(known),
            "num_items": self.num_items,
            "num_tokens": self.num_tokens,
            "accuracy": round(accuracy, 6),
            "accuracy_interval_95": _rounded(wilson_interval(accuracy, len(known))),
        }
        if nothing is not None and nothing is not self:
            found = paired(self.rewards, nothing.rewards)
            data["difference"] = round(statistics.fmean(found), 6) if found else None
            data["difference_interval_95"] = _rounded(paired_interval(found))
        return data


@dataclass(frozen=True, kw_only=True)
class Worth:
    """What one item adds: accuracy with the whole library less accuracy without the item."""

    item_id: str
    differences: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        mean = statistics.fmean(self.differences) if self.differences else 0.0
        return {
            "difference": round(mean, 6),
            "interval_95": _rounded(paired_interval(self.differences)),
            "num_questions": len(self.differences),
        }


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Measures libraries within the evaluation budget. What no longer fits is left out, and said to be."""

    method: TrainingFreeGrpo
    student: Student
    teacher: Teacher
    test: Sequence[Question]
    seed: int
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None

    async def arm(self, name: str, library: ExperienceLibrary) -> Arm | None:
        """One library on all test questions; None when the budget does not suffice."""
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            self.on_progress(f"evaluate {name}", done, len(self.test))

        try:
            rewards = await self.student.rewards(
                library,
                self.test,
                self.method.evaluation,
                samples=self.method.report.samples,
                split="test",
                purpose="evaluation",
                on_question=count,
            )
        except BudgetExhausted:
            return None
        return Arm(
            name=name,
            rewards=tuple(rewards),
            num_items=len(library.items),
            num_tokens=library.num_tokens_estimate,
        )

    async def tips(self, library: ExperienceLibrary, train: Sequence[Question]) -> ExperienceLibrary | None:
        """Lessons written without attempts, at most as long as `library`; None when the budget does not suffice."""
        chosen = sorted(train, key=lambda question: question.id)
        random.Random(f"tips/{self.seed}").shuffle(chosen)
        examples = [(question.text, question.reference) for question in chosen[:MAX_TIP_EXAMPLES]]
        try:
            written = await self.teacher.write_tips(examples, max_tips=len(library.items), purpose="evaluation")
        except BudgetExhausted:
            return None
        tips = replace(library, items=tuple({op.item().id: op.item() for op in written}.values()))
        while tips.items and tips.num_tokens_estimate > library.num_tokens_estimate:
            tips = replace(tips, items=tips.items[:-1])
        return tips

    async def worths(self, library: ExperienceLibrary) -> list[Worth] | None:
        """Leave each item out once, on the first of the shuffled test questions."""
        chosen = sorted(self.test, key=lambda question: question.id)
        random.Random(f"worth/{self.seed}").shuffle(chosen)
        chosen = chosen[: self.method.report.worth_questions]

        async def rewards(some: ExperienceLibrary) -> list[float | None]:
            return await self.student.rewards(
                some,
                chosen,
                self.method.evaluation,
                samples=self.method.report.samples,
                split="test",
                purpose="evaluation",
            )

        try:
            whole = await rewards(library)
            parts = await in_order(rewards(library.without(item.id)) for item in library.items)
        except BudgetExhausted:
            return None
        return [
            Worth(item_id=item.id, differences=tuple(paired(whole, part)))
            for item, part in zip(library.items, parts, strict=True)
        ]


def placebo_of(library: ExperienceLibrary) -> ExperienceLibrary:
    """General advice of the same length, number of items, heading and placement."""
    target = library.num_tokens_estimate
    words = " ".join(_ADVICE).split()
    items: list[Experience] = []
    position = 0
    for number, item in enumerate(library.items, 1):
        name = f"General advice {number}"
        # As many bytes as the item it stands for, so that the whole has the same estimated number of tokens.
        wanted = len(f"{item.name}: {item.text}".encode()) - len(f"{name}: ".encode())
        text = ""
        while len(text) < wanted:
            text += (" " if text else "") + words[position % len(words)]
            position += 1
        items.append(Experience(name=name, text=text[: max(1, wanted)].rstrip() or words[0]))
    placebo = replace(library, items=tuple(items))
    assert abs(placebo.num_tokens_estimate - target) <= len(items) + 1
    return placebo


def paired(one: Sequence[float | None], other: Sequence[float | None]) -> list[float]:
    """one - other over the questions that have both."""
    return [a - b for a, b in zip(one, other, strict=True) if a is not None and b is not None]


def _rounded(pair: tuple[float, float]) -> list[float]:
    return [round(value, 6) for value in pair]
