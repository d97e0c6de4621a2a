"""The gate: a change of the library is accepted only when held-out questions show that it does not harm.

The level of a run is shared evenly by the tests that it can make, one a batch. A batch without a change leaves its
share to the later ones, and so does a test that accepts: its level was not lost (the recycling of fallback procedures,
Wiens and Dmitrienko 2005; online by Tian and Ramdas 2021). On any course of a run the levels of the tests that do not
accept sum to alpha at most. The order of the gate's questions is fixed for a run, the teacher never sees them, and all
that leaves the gate is yes or no.

Where every reward is 0 or 1 and a gain is asked for, a test is the exact sequential sign test (`paired_signs`);
otherwise it bets (`statistics`), which holds for any rewards and any delta.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from gym_trainer.experience.paired_signs import Look, sign_lower_bound, sign_rejects
from gym_trainer.experience.statistics import lower_bound, rejects

LOOK_EVERY = 20
"""Questions between two looks. A constant, so that what is asked does not depend on the concurrency."""


@dataclass
class AlphaSpending:
    """The level of each test of a run."""

    total: float
    """1 - confidence: the probability that any accepted change is harmful."""

    planned: int
    """The tests that a run can make at most."""

    passed: int = 0
    """Tests that were made, or are not needed any more."""

    lost: float = 0.0
    """The level of the tests that did not accept."""

    def next_level(self) -> float:
        """The level of the next test: an even share of what is left. Nothing is left after the planned ones."""
        return (self.total - self.lost) / (self.planned - self.passed) if self.passed < self.planned else 0.0

    def record(self, *, accepted: bool) -> None:
        """Count a test; one that accepts leaves its level to the later ones."""
        self.lost += 0.0 if accepted else self.next_level()
        self.passed += 1

    def skip(self) -> None:
        """A batch needed no test."""
        self.passed += 1


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """What a test found."""

    accepted: bool
    alpha: float
    delta: float
    test: Literal["sign", "betting"]
    num_questions: int
    """Questions that were looked at before it was decided."""

    mean_difference: float
    lower_bound: float
    """One-sided, at level 1 - alpha."""

    current_accuracy: float
    candidate_accuracy: float


Scores = Callable[[Sequence[int]], Awaitable[list[tuple[float, float]]]]
"""From positions of gate questions to their rewards with the current library and with the candidate. A question without
both has no pair."""


@dataclass
class Gate:
    """Decides one change after the other."""

    num_questions: int
    delta: float
    spending: AlphaSpending
    all_or_nothing: bool = False
    """Every reward is 0 or 1."""

    results: list[GateResult] = field(default_factory=list)

    @property
    def test(self) -> Literal["sign", "betting"]:
        """Chosen before any answer, by what rewards can be."""
        return "sign" if self.all_or_nothing and self.delta == 0.0 else "betting"

    async def decide(self, scores: Scores) -> GateResult:
        """Test a candidate against the current library, looking after every twenty questions."""
        alpha = self.spending.next_level()
        pairs: list[tuple[float, float]] = []
        differences: list[float] = []
        looks: list[Look] = []
        by_sign = self.test == "sign"
        accepted = False
        asked = 0
        while asked < self.num_questions and not accepted and alpha > 0.0:
            positions = range(asked, min(asked + LOOK_EVERY, self.num_questions))
            asked = positions.stop
            pairs += await scores(positions)
            differences = [candidate - current for current, candidate in pairs]
            righted, spoiled = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
            looks.append(Look(share=asked / self.num_questions, righted=righted, spoiled=spoiled))
            accepted = sign_rejects(looks, alpha) if by_sign else rejects(differences, -self.delta, alpha)
            if not accepted and self._is_futile(differences):
                break
        current, candidate = zip(*pairs, strict=True) if pairs else ((), ())
        result = GateResult(
            accepted=accepted,
            alpha=alpha,
            delta=self.delta,
            test=self.test,
            num_questions=len(pairs),
            mean_difference=_mean(differences),
            lower_bound=sign_lower_bound(looks, len(pairs), alpha) if by_sign else lower_bound(differences, alpha),
            current_accuracy=_mean(current),
            candidate_accuracy=_mean(candidate),
        )
        self.spending.record(accepted=accepted)
        self.results.append(result)
        return result

    def _is_futile(self, differences: Sequence[float]) -> bool:
        """Whether more questions would hardly help: one standard error above the mean is still no gain.

        Stopping early can only reject, so it costs power and never the level.
        """
        if len(differences) < 2:
            return False
        values = np.asarray(differences)
        return float(values.mean() + values.std(ddof=1) / len(values) ** 0.5) <= -self.delta


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
