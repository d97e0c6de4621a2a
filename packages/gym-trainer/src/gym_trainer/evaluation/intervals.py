"""Intervals around shares, honest at the ends and about rows that hang together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054


@dataclass(frozen=True, kw_only=True)
class Share:
    """`count` of `total`, with a 95 % interval."""

    count: int
    total: int
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.count / self.total if self.total else 0.0

    def to_json(self) -> dict[str, float]:
        return {"count": self.count, "total": self.total, "value": self.value, "low": self.low, "high": self.high}


def share(count: int, total: int) -> Share:
    """A share of independent trials."""
    low, high = wilson(count / total if total else 0.0, total)
    return Share(count=count, total=total, low=low, high=high)


def clustered_share(counts: Sequence[tuple[int, int]]) -> Share:
    """A share of trials that come in groups: the fields of a row are right or wrong together.

    Treating them as independent would make the interval too narrow. The number of trials is divided by the design
    effect, the ratio of the variance between groups (of a ratio estimator; Cochran, Sampling Techniques, 6.3) to that
    of independent trials.
    """
    count, total = sum(k for k, _ in counts), sum(n for _, n in counts)
    if total == 0:
        return Share(count=0, total=0, low=0.0, high=1.0)
    p, groups = count / total, len(counts)
    independent = p * (1 - p) / total
    effect = 1.0
    if groups > 1 and independent > 0:
        squares = sum((k - p * n) ** 2 for k, n in counts)
        effect = max(1.0, groups / (groups - 1) * squares / total**2 / independent)
    low, high = wilson(p, total / effect)
    return Share(count=count, total=total, low=low, high=high)


def wilson(p: float, n: float, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval (JASA 22, 1927); (0, 1) without trials."""
    if n <= 0:
        return 0.0, 1.0
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
