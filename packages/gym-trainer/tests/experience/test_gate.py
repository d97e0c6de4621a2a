"""Guards the gate's statistics: harmful changes pass no more often than promised, over a whole run, at any size."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from gym_trainer.experience.gate import LOOK_EVERY, AlphaSpending, Gate, GateResult
from gym_trainer.experience.paired_signs import Look, sign_lower_bound, sign_rejects
from gym_trainer.experience.statistics import (
    log_wealth,
    lower_bound,
    paired_interval,
    rejects,
    student_quantile,
    wilson_interval,
)

Draw = Callable[[np.random.Generator, int], np.ndarray]


def three_valued(better: float, worse: float) -> Draw:
    """Differences of right and wrong answers: +1, -1 or 0."""

    def draw(rng: np.random.Generator, count: int) -> np.ndarray:
        u = rng.random(count)
        return np.where(u < better, 1.0, np.where(u < better + worse, -1.0, 0.0))

    return draw


# Each has a mean of exactly -delta: the least favourable harmful change. Rare large losses are where a t-test fails.
LEAST_FAVOURABLE = [
    pytest.param(0.0, three_valued(0.25, 0.25), id="even"),
    pytest.param(0.0, three_valued(0.02, 0.02), id="rare"),
    pytest.param(0.05, three_valued(0.0, 0.05), id="rare losses"),
    pytest.param(0.05, three_valued(0.4, 0.45), id="noisy"),
    pytest.param(0.02, lambda rng, n: np.where(rng.random(n) < 0.98, 0.0, -1.0), id="one in fifty"),
    pytest.param(0.1, lambda rng, n: rng.uniform(-0.6, 0.4, n), id="partial credit"),
    pytest.param(0.0, lambda rng, n: np.where(rng.random(n) < 0.9, 0.1, -0.9), id="lopsided"),
]


async def decide(gate: Gate, differences: np.ndarray) -> GateResult:
    async def scores(positions: Sequence[int]) -> list[tuple[float, float]]:
        # Rewards lie in [0, 1]; only their difference counts.
        return [(max(0.0, -d), max(0.0, d)) for d in differences[list(positions)]]

    return await gate.decide(scores)


def decide_once(gate: Gate, differences: np.ndarray) -> GateResult:
    return asyncio.run(decide(gate, differences))


@pytest.mark.parametrize(("delta", "draw"), LEAST_FAVOURABLE)
@pytest.mark.parametrize("size", [30, 100])
def test_a_harmful_change_passes_a_single_test_no_more_often_than_alpha(delta: float, draw: Draw, size: int) -> None:
    rng, alpha, repeats = np.random.default_rng(size), 0.05, 1500
    accepted = sum(rejects(draw(rng, size), -delta, alpha) for _ in range(repeats))
    # Three standard errors of a binomial above its bound.
    assert accepted / repeats <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / repeats)


async def share_of_runs_with_a_false_acceptance(
    delta: float, spending: Callable[[int], AlphaSpending], *, runs: int, tests: int = 12, all_or_nothing: bool = False
) -> float:
    """Runs of harmful changes, each tested on the same questions, each reacting to the decisions before it."""
    rng, false_runs = np.random.default_rng(7), 0
    for _ in range(runs):
        difficulty = rng.random(60)
        gate = Gate(num_questions=60, delta=delta, spending=spending(tests), all_or_nothing=all_or_nothing)
        for rejected in range(tests):
            # What a change touches depends on the questions and on the history; its mean effect is -delta.
            touched = (difficulty * (1 + 0.3 * rejected)) % 1.0 < 0.5
            differences = np.where(touched, np.where(rng.random(60) < 0.5, 1.0, -1.0), 0.0)
            if delta:
                harmed, spared = rng.random(60) < delta, rng.random(60) < delta
                differences = np.where(harmed, -1.0, np.where(spared, 0.0, differences))
            if (await decide(gate, differences)).accepted:
                false_runs += 1
                break
    return false_runs / runs


@pytest.mark.parametrize(("delta", "all_or_nothing"), [(0.0, False), (0.05, False), (0.0, True)])
@pytest.mark.parametrize("runs", [150, pytest.param(4000, marks=pytest.mark.slow)])
def test_a_run_of_harmful_changes_accepts_any_with_at_most_alpha(delta: float, all_or_nothing: bool, runs: int) -> None:
    alpha = 0.05
    share = asyncio.run(
        share_of_runs_with_a_false_acceptance(
            delta,
            lambda tests: AlphaSpending(total=alpha, planned=tests),
            runs=runs,
            all_or_nothing=all_or_nothing,
        )
    )
    assert share <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / runs)


def test_without_spending_reuse_of_the_gate_would_break_the_promise() -> None:
    class Unspent(AlphaSpending):
        def next_level(self) -> float:
            return self.total

    share = asyncio.run(
        share_of_runs_with_a_false_acceptance(0.0, lambda tests: Unspent(total=0.05, planned=tests), runs=100)
    )
    assert share > 0.1


def test_true_gains_pass_and_clear_ones_with_few_questions() -> None:
    rng = np.random.default_rng(3)
    results = []
    for _ in range(100):
        gate = Gate(num_questions=100, delta=0.0, spending=AlphaSpending(total=0.05, planned=1))
        results.append(decide_once(gate, three_valued(0.45, 0.05)(rng, 100)))
    assert np.mean([result.accepted for result in results]) > 0.97
    assert np.mean([result.num_questions for result in results]) < 60


def test_a_hopeless_change_is_given_up_early() -> None:
    rng = np.random.default_rng(4)
    gate = Gate(num_questions=400, delta=0.0, spending=AlphaSpending(total=0.05, planned=1))
    result = decide_once(gate, three_valued(0.05, 0.4)(rng, 400))
    assert not result.accepted
    assert result.num_questions == LOOK_EVERY


def test_acceptance_and_the_lower_bound_are_one_statement() -> None:
    rng = np.random.default_rng(5)
    for _ in range(60):
        differences = three_valued(0.3, rng.uniform(0, 0.3))(rng, int(rng.integers(5, 120)))
        for delta in (0.0, 0.05, 0.2):
            bound = lower_bound(differences, 0.05)
            assert rejects(differences, -delta, 0.05) == (bound > -delta - 2e-4) or abs(bound + delta) < 3e-4


def test_questions_that_never_differ_pass_by_the_rule_of_three_only() -> None:
    """With k equal questions a loss of delta in each is excluded at level (1 - delta)^k at best."""
    delta = 0.05
    for count in (20, 58, 100, 200):
        best_bet = count * -math.log(1 - delta)
        assert log_wealth([0.0] * count, -delta)[-1] <= best_bet
        if rejects([0.0] * count, -delta, 0.05):
            assert (1 - delta) ** count <= 0.05
    assert rejects([0.0] * 100, -delta, 0.05)
    assert not rejects([0.0] * 1000, 0.0, 0.05), "no difference is no gain"


def test_levels_sum_to_alpha_and_neither_an_acceptance_nor_a_batch_without_change_loses_its_level() -> None:
    spending = AlphaSpending(total=0.06, planned=6)
    levels = []
    for _ in range(6):
        levels.append(spending.next_level())
        spending.record(accepted=False)
    assert levels == pytest.approx([0.01] * 6)
    assert spending.next_level() == 0.0, "nothing is left after the planned tests"
    spending = AlphaSpending(total=0.06, planned=6)
    spending.record(accepted=True)
    assert spending.next_level() == pytest.approx(0.06 / 5)
    spending.skip()
    assert spending.next_level() == pytest.approx(0.06 / 4)
    spending.record(accepted=False)
    assert spending.next_level() == pytest.approx(0.045 / 3)


def looks_of(differences: np.ndarray, every: int = LOOK_EVERY) -> list[Look]:
    """What a gate that asks all of them looks at."""
    looks = []
    for end in range(every, len(differences) + every, every):
        seen = differences[:end]
        share = min(1.0, end / len(differences))
        looks.append(Look(share=share, righted=int((seen > 0).sum()), spoiled=int((seen < 0).sum())))
    return looks


@pytest.mark.parametrize("alpha", [0.05, 0.01, 0.0017])
def test_the_sign_test_at_one_look_is_the_binomial_test(alpha: float) -> None:
    for righted in range(30):
        for spoiled in range(12):
            n = righted + spoiled
            p = sum(math.comb(n, k) for k in range(righted, n + 1)) / 2**n
            assert sign_rejects([Look(share=1.0, righted=righted, spoiled=spoiled)], alpha) == (p <= alpha)


@pytest.mark.parametrize(("better", "worse"), [(0.25, 0.25), (0.02, 0.02), (0.5, 0.5), (0.1, 0.15)])
@pytest.mark.parametrize("size", [30, 100])
def test_the_sign_test_passes_no_useless_change_more_often_than_alpha(better: float, worse: float, size: int) -> None:
    rng, alpha, repeats = np.random.default_rng(size), 0.05, 3000
    draw = three_valued(better, worse)
    accepted = sum(sign_rejects(looks_of(draw(rng, size)), alpha) for _ in range(repeats))
    assert accepted / repeats <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / repeats)


def test_looks_spend_the_level_by_exact_enumeration() -> None:
    """Three looks at two differing questions each: every course of six coins, counted by hand."""
    crossed = 0
    for coins in itertools.product([1.0, -1.0], repeat=6):
        crossed += sign_rejects(looks_of(np.array(coins), every=2), 0.25)
    assert 0 < crossed / 2**6 <= 0.25


def test_where_answers_are_right_or_wrong_the_sign_test_needs_fewer_questions_than_betting() -> None:
    found = {}
    for name, all_or_nothing in (("sign", True), ("betting", False)):
        rng = np.random.default_rng(3)
        results = [
            decide_once(
                Gate(
                    num_questions=100,
                    delta=0.0,
                    spending=AlphaSpending(total=0.01, planned=1),
                    all_or_nothing=all_or_nothing,
                ),
                three_valued(0.28, 0.10)(rng, 100),
            )
            for _ in range(100)
        ]
        assert {result.test for result in results} == {name}
        found[name] = np.mean([result.accepted for result in results])
    assert found["sign"] > found["betting"] + 0.2


def test_the_sign_tests_bound_is_above_zero_exactly_where_it_accepts() -> None:
    rng = np.random.default_rng(8)
    for _ in range(40):
        looks = looks_of(three_valued(0.3, rng.uniform(0.05, 0.3))(rng, 80))
        bound = sign_lower_bound(looks, 80, 0.02)
        assert sign_rejects(looks, 0.02) == (bound > 0) or abs(bound) < 2e-4
    assert sign_lower_bound([Look(share=1.0, righted=0, spoiled=0)], 80, 0.02) == -1.0
    assert sign_lower_bound([], 0, 0.02) == -1.0


def test_partial_credit_and_a_margin_are_left_to_the_betting_test() -> None:
    spending = AlphaSpending(total=0.05, planned=1)
    assert Gate(num_questions=40, delta=0.05, spending=spending, all_or_nothing=True).test == "betting"
    assert Gate(num_questions=40, delta=0.0, spending=spending).test == "betting"
    assert Gate(num_questions=40, delta=0.0, spending=spending, all_or_nothing=True).test == "sign"


def test_questions_without_a_pair_are_left_out() -> None:
    async def scores(positions: Sequence[int]) -> list[tuple[float, float]]:
        return [(0.0, 1.0) for position in positions if position % 2 == 0]

    gate = Gate(num_questions=60, delta=0.0, spending=AlphaSpending(total=0.05, planned=1))
    result = asyncio.run(gate.decide(scores))
    assert result.accepted
    assert result.num_questions == LOOK_EVERY / 2
    assert (result.current_accuracy, result.candidate_accuracy, result.mean_difference) == (0.0, 1.0, 1.0)


def test_a_gate_without_any_pair_accepts_nothing() -> None:
    async def scores(positions: Sequence[int]) -> list[tuple[float, float]]:
        return []

    gate = Gate(num_questions=40, delta=0.5, spending=AlphaSpending(total=0.05, planned=1))
    result = asyncio.run(gate.decide(scores))
    assert (result.accepted, result.num_questions, result.lower_bound) == (False, 0, -1.0)


@pytest.mark.parametrize(
    ("mean", "count", "interval"),
    [(0.5, 100, (0.4038, 0.5962)), (0.0, 30, (0.0, 0.1135)), (1.0, 30, (0.8865, 1.0)), (0.9, 10, (0.5958, 0.9821))],
)
def test_wilson_agrees_with_published_values(mean: float, count: int, interval: tuple[float, float]) -> None:
    assert wilson_interval(mean, count) == pytest.approx(interval, abs=2e-4)


@pytest.mark.parametrize(
    ("probability", "degrees", "quantile"),
    [(0.975, 4, 2.7764), (0.975, 9, 2.2622), (0.975, 29, 2.0452), (0.975, 199, 1.9720), (0.95, 19, 1.7291)],
)
def test_students_quantiles_agree_with_published_values(probability: float, degrees: int, quantile: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(quantile, rel=0.01)


def test_the_paired_interval_covers_the_mean() -> None:
    rng = np.random.default_rng(11)
    inside = 0
    for _ in range(1000):
        low, high = paired_interval(three_valued(0.3, 0.1)(rng, 60))
        inside += low <= 0.2 <= high
    assert inside / 1000 > 0.93
    assert paired_interval([0.0] * 30) == (-0.1, 0.1)
    assert paired_interval([]) == (-1.0, 1.0)
