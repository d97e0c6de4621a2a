"""Guards how a token is drawn: each setting against its definition, computed apart in float64."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from gym_serve.engines.base import SamplingParams
from gym_serve.engines.sampling import RowSampler, sample

V = 300


def logits(seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(1, V, generator=torch.Generator().manual_seed(seed))


def sampler(prompt: tuple[int, ...] = (), **settings) -> RowSampler:
    return RowSampler(SamplingParams(**settings), prompt, torch.device("cpu"))


def draws(count: int, **settings) -> Counter[int]:
    row = sampler(seed=7, **settings)
    return Counter(sample(logits(), [row], [None])[0].id for _ in range(count))


def distribution(temperature: float = 1.0) -> np.ndarray:
    values = logits()[0].double().numpy() / temperature
    weights = np.exp(values - values.max())
    return weights / weights.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_distribution(temperature: float) -> None:
    count = 3000
    expected = distribution(temperature)
    seen = draws(count, temperature=temperature)
    for token in np.argsort(-expected)[:5]:
        p = expected[token]
        assert abs(seen[int(token)] / count - p) < 5 * math.sqrt(p * (1 - p) / count)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 3}, lambda p: np.argsort(-p)[:3]),
        ({"top_p": 0.6}, lambda p: np.argsort(-p)[: int((np.cumsum(np.sort(p)[::-1]) < 0.6).sum()) + 1]),
        ({"top_p": 0.0}, lambda p: np.argsort(-p)[:1]),
        ({"min_p": 0.2}, lambda p: np.flatnonzero(p >= 0.2 * p.max())),
        ({"top_p": 0.9999, "temperature": 5.0}, lambda p: range(V)),
    ],
)
def test_cuts_keep_what_their_definition_keeps(settings: dict, kept) -> None:
    allowed = set(map(int, kept(distribution(settings.get("temperature", 1.0)))))
    seen = draws(1500, **settings)
    assert set(seen) <= allowed
    likely = [t for t in allowed if distribution()[t] > 0.02]
    assert set(likely) <= set(seen)


def test_a_seed_fixes_the_draws_whatever_the_neighbours() -> None:
    def run(neighbours: int) -> list[int]:
        rows = [sampler(seed=5)] + [sampler(seed=i) for i in range(neighbours)]
        return [sample(logits(step).expand(len(rows), V), rows, [None] * len(rows))[0].id for step in range(20)]

    assert run(0) == run(3)
    assert run(0) != [sample(logits(step), [sampler(seed=6)], [None])[0].id for step in range(20)]


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draws(5, temperature=0.0) == {int(logits().argmax()): 5}


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"presence_penalty": 0.7}, lambda z, n: z - 0.7 * (n > 0)),
        ({"frequency_penalty": 0.3}, lambda z, n: z - 0.3 * n),
        ({"presence_penalty": -1.0, "frequency_penalty": 0.5}, lambda z, n: z + (n > 0) - 0.5 * n),
    ],
)
def test_penalties_count_the_answer_and_not_the_prompt(settings: dict, change) -> None:
    row = sampler(prompt=(4, 4, 9), temperature=0.0, **settings)
    counts = torch.zeros(V)
    for token in (1, 2, 2, 2):
        row.saw(token)
        counts[token] += 1
    out = logits()[0].clone()
    row.penalise(out)
    torch.testing.assert_close(out, change(logits()[0], counts))


def test_repetition_penalty_counts_prompt_and_answer() -> None:
    row = sampler(prompt=(4,), repetition_penalty=1.5)
    row.saw(6)
    out, before = logits()[0].clone(), logits()[0]
    row.penalise(out)
    for token in (4, 6):
        assert out[token] == pytest.approx(before[token] / 1.5 if before[token] > 0 else before[token] * 1.5)
    assert torch.equal(torch.cat([out[:4], out[7:]]), torch.cat([before[:4], before[7:]]))


def test_logit_bias_bans_and_forces() -> None:
    best = int(logits().argmax())
    assert draws(50, logit_bias={best: -100.0})[best] == 0
    assert draws(5, logit_bias={3: 100.0}) == {3: 5}


def test_a_mask_forbids_whatever_the_bias() -> None:
    allowed = torch.zeros(1, V, dtype=torch.bool)
    allowed[0, [10, 11]] = True
    row = sampler(seed=0, logit_bias={3: 100.0})
    assert {sample(logits(), [row], [None], allowed)[0].id for _ in range(30)} <= {10, 11}


def test_logprobs_are_the_models_own_and_sorted() -> None:
    row = sampler(temperature=0.0, logit_bias={3: 100.0})
    token = sample(logits(), [row], [4])[0]
    expected = np.log(distribution())
    assert token.id == 3
    assert token.logprob == pytest.approx(expected[3], abs=1e-5)
    assert [i for i, _ in token.top] == list(np.argsort(-expected)[:4])
    np.testing.assert_allclose([value for _, value in token.top], np.sort(expected)[::-1][:4], atol=1e-5)
    chosen_only = sample(logits(), [sampler(temperature=0.0)], [0])[0]
    assert chosen_only.top == ()
    assert chosen_only.logprob == pytest.approx(expected.max(), abs=1e-5)
