"""The gate: a change of the library is accepted only when held-out questions show that it does not harm.

Levels are spent over a run by the online fallback procedure (Tian and Ramdas, "Online control of the familywise error
rate", 2021): test k gets alpha / (k (k + 1)), and a test that accepts hands its whole level on to the next one. The
probability that a run ever accepts a change whose true effect is -delta or worse is then at most alpha, however many
changes there are and however they depend on each other. The order of the gate's questions is fixed for a run, the
teacher never sees them, and all that leaves the gate is yes or no.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gym_trainer.experience.statistics import lower_bound, rejects

LOOK_EVERY = 20
"""Questions between two looks. A constant, so that what is asked does not depend on the concurrency."""


@dataclass
class AlphaSpending:
    """The level of each test of a run."""

    total: float
    """1 - confidence: the probability that any accepted change is harmful."""

    tests: int = 0
    carried: float = 0.0

    def next_level(self) -> float:
        """The level of the next test."""
        k = self.tests + 1
        return self.total / (k * (k + 1)) + self.carried

    def record(self, *, accepted: bool) -> None:
        """Count a test; an accepting one hands its level on."""
        level = self.next_level()
        self.tests += 1
        self.carried = level if accepted else 0.0


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """What a test found."""

    accepted: bool
    alpha: float
    delta: float
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
    results: list[GateResult] = field(default_factory=list)

    async def decide(self, scores: Scores) -> GateResult:
        """Test a candidate against the current library, looking after every twenty questions."""
        alpha = self.spending.next_level()
        pairs: list[tuple[float, float]] = []
        differences: list[float] = []
        accepted = False
        asked = 0
        while asked < self.num_questions and not accepted:
            positions = range(asked, min(asked + LOOK_EVERY, self.num_questions))
            asked = positions.stop
            pairs += await scores(positions)
            differences = [candidate - current for current, candidate in pairs]
            accepted = rejects(differences, -self.delta, alpha)
            if not accepted and self._is_futile(differences):
                break
        current, candidate = zip(*pairs, strict=True) if pairs else ((), ())
        result = GateResult(
            accepted=accepted,
            alpha=alpha,
            delta=self.delta,
            num_questions=len(pairs),
            mean_difference=_mean(differences),
            lower_bound=lower_bound(differences, alpha),
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
