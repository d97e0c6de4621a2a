"""The statistics of the gate and of the report, each finite-sample or said not to be.

The gate's test bets against "the change loses delta or more" (Waudby-Smith and Ramdas, "Estimating means of bounded
random variables by betting", JRSS B 2024). For paired differences d_i in [-1, 1] and a hypothetical mean m,

    W_n(m) = average over bets u of  prod_{i <= n} (1 + u (d_i - m) / (1 + m)),      0 < u < 1

is a non-negative martingale, or falls, when the mean is at most m. By Ville's inequality it reaches 1/alpha at any time
with probability at most alpha. So the test is exact for every n and every distribution on [-1, 1], small and lopsided
ones included, and it may be looked at after every question: a clear gain needs fewer calls. The lower bound is the
largest m that has been rejected so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

BETS = np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
"""Stakes as shares of the largest allowed one. Small stakes suit long, noisy splits; large ones short, clear gains."""


def log_wealth(differences: Sequence[float], mean: float) -> NDArray[np.float64]:
    """log W_n(mean) for n = 1 ... N, where `mean` is in (-1, 1)."""
    d_N = np.asarray(differences, dtype=np.float64)
    factors_BN = 1.0 + BETS[:, None] * (d_N[None, :] - mean) / (1.0 + mean)
    logs_BN = np.cumsum(np.log(factors_BN), axis=1)
    peak_N = logs_BN.max(axis=0)
    return peak_N + np.log(np.exp(logs_BN - peak_N).mean(axis=0))


def rejects(differences: Sequence[float], mean: float, alpha: float) -> bool:
    """Whether "the mean difference is at most `mean`" has been rejected at level alpha by any number of questions."""
    return len(differences) > 0 and bool(log_wealth(differences, mean).max() >= -math.log(alpha))


def lower_bound(differences: Sequence[float], alpha: float) -> float:
    """The lower one-sided 1 - alpha bound of the mean difference; -1 where nothing is known. Exact to 1e-4."""
    low, high = -1.0 + 1e-6, 1.0 - 1e-6
    if not rejects(differences, low, alpha):
        return -1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if rejects(differences, middle, alpha) else (low, middle)
    return low


def wilson_interval(mean: float, num_questions: int, confidence: float = 0.95) -> tuple[float, float]:
    """The two-sided interval of an accuracy (Wilson 1927), by questions.

    For rewards between 0 and 1, or means of several answers a question, the variance is at most that of a coin with
    the same mean, so the interval is too wide rather than too narrow.
    """
    if num_questions == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    n = num_questions
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(max(0.0, mean * (1 - mean) / n + z * z / (4 * n * n)))
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_interval(differences: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The two-sided interval of a mean paired difference by Student's t: near its level from about 30 questions on."""
    n = len(differences)
    if n < 2:
        return -1.0, 1.0
    values = np.asarray(differences, dtype=np.float64)
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(n)
    # Without a single differing question the deviation is 0 and says nothing: the rule of three bounds it instead.
    half = student_quantile(0.5 + confidence / 2, n - 1) * error if error > 0 else 3.0 / n
    return max(-1.0, mean - half), min(1.0, mean + half)


def student_quantile(probability: float, degrees: int) -> float:
    """Student's t quantile from the normal one (Abramowitz and Stegun 26.7.5); within 1% from four degrees on."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees ** (power + 1) for power, term in enumerate(terms))
