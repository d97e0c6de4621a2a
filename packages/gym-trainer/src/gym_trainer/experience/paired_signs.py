"""The exact test of a paired difference where every answer is right or wrong.

Of the questions on which two libraries differ, count those that the candidate rights. When the candidate is no better,
each of them is one with probability 1/2 at most, whatever the questions and however many differ: given the number that
differ, the count is binomial (McNemar 1947; Lehmann and Romano, "Testing Statistical Hypotheses", 4.9). The test looks
at points fixed in advance. By each it may have spent `alpha * share ** 2`, where `share` is the part of the questions
that were asked (Lan and DeMets 1983; the power family of Kim and DeMets 1987): the boundary is the lowest count whose
probability of having been reached by then, by exact convolution, is within that.

Unlike the test by betting (`statistics`), which holds for any rewards, it knows the size of the split in advance and
pays only for the looks that are made. With 28 answers righted and 10 spoiled of 100, betting reaches a level of 0.04,
the binomial test at the end 0.003.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SPENDING_POWER = 2.0


@dataclass(frozen=True, kw_only=True)
class Look:
    """What all questions that were asked by one look came to."""

    share: float
    """The part of the split that was asked, from 0 to 1; known before any answer."""

    righted: int
    """Questions that only the candidate answers."""

    spoiled: int
    """Questions that only the current library answers."""


def sign_rejects(looks: Sequence[Look], alpha: float, chance: float = 0.5) -> bool:
    """Whether "a differing question is righted with probability `chance` at most" is rejected at any of the looks."""
    alive_B = np.ones(1)
    """alive_B[b]: the probability, at `chance`, of b righted questions and no boundary crossed yet."""

    crossed, differing = 0.0, 0
    for look in looks:
        alive_B = np.convolve(alive_B, _binomial(look.righted + look.spoiled - differing, chance))
        differing = look.righted + look.spoiled
        allowed = alpha * look.share**SPENDING_POWER - crossed
        tail_B = np.cumsum(alive_B[::-1])[::-1]
        boundary = int(np.searchsorted(-tail_B, -allowed, side="left"))
        if look.righted >= boundary:
            return True
        if boundary < len(alive_B):
            crossed += float(tail_B[boundary])
            alive_B = np.where(np.arange(len(alive_B)) < boundary, alive_B, 0.0)
    return False


def sign_lower_bound(looks: Sequence[Look], num_questions: int, alpha: float) -> float:
    """The lower one-sided bound of the mean difference over `num_questions`; -1 where nothing is known.

    Above 0 exactly where the test accepts. Its size takes the share of differing questions as it was seen.
    """
    if not looks or num_questions == 0 or looks[-1].righted + looks[-1].spoiled == 0:
        return -1.0
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if sign_rejects(looks, alpha, middle) else (low, middle)
    return (2.0 * low - 1.0) * (looks[-1].righted + looks[-1].spoiled) / num_questions


def _binomial(count: int, chance: float) -> NDArray[np.float64]:
    """The probabilities of 0 ... `count` successes."""
    if chance <= 0.0 or chance >= 1.0:
        return np.eye(1, count + 1, count if chance >= 1.0 else 0)[0]
    k = np.arange(count + 1)
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    log_ways = log_factorials[-1] - log_factorials - log_factorials[::-1]
    return np.exp(log_ways + k * np.log(chance) + (count - k) * np.log1p(-chance))
