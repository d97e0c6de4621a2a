"""Preference methods without a reference model: ORPO, SimPO, CPO.

Where a paper adds the likelihood of the chosen answer, it is a token's mean here, so that its weight means the same for
short and long answers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from gym_sdk.spec import Cpo, Orpo, Simpo
from gym_trainer.loop.batch import MicroBatch
from gym_trainer.loop.forward import ForwardModel
from gym_trainer.objectives.base import LossSum, Ratio
from gym_trainer.objectives.logprobs import Pairs, answer_lengths, answer_sums
from gym_trainer.objectives.preference import (
    PairObjective,
    hinge,
    pair_metrics,
    smoothed_logistic,
    squared_to_target,
)


class OrpoObjective(PairObjective):
    """-log p(chosen) / length - lambda log sigmoid(log odds ratio) (arXiv 2403.07691, equations 4 to 7)."""

    def __init__(self, method: Orpo) -> None:
        self.weight: float = method.odds_ratio_weight

    def loss(self, model: ForwardModel, micro_batch: MicroBatch, statistics: dict[str, float]) -> LossSum:
        logprobs, means = _logprobs_and_means(model, micro_batch)
        log_odds_P = means.difference() - (_log1mexp(means.chosen_P) - _log1mexp(means.rejected_P))
        log_ratio_P = logsigmoid(log_odds_P)
        nll_P = -means.chosen_P
        metrics = pair_metrics(means.times(self.weight), logprobs) | {
            "nll_loss": Ratio.mean(nll_P),
            "log_odds_ratio": Ratio.mean(log_ratio_P),
            "log_odds_chosen": Ratio.mean(log_odds_P),
        }
        return LossSum((nll_P - self.weight * log_ratio_P).sum(), metrics)


class SimpoObjective(PairObjective):
    """-log sigmoid(beta (mean log p(chosen) - mean log p(rejected)) - gamma) (arXiv 2405.14734, equation 6)."""

    def __init__(self, method: Simpo) -> None:
        self.method = method

    def loss(self, model: ForwardModel, micro_batch: MicroBatch, statistics: dict[str, float]) -> LossSum:
        logprobs, means = _logprobs_and_means(model, micro_batch)
        rewards = means.times(self.method.beta)
        losses_P = smoothed_logistic(rewards.difference() - self.method.gamma, self.method.label_smoothing)
        metrics = pair_metrics(rewards, logprobs)
        return _with_likelihood(losses_P, means, self.method.sft_weight, metrics)


class CpoObjective(PairObjective):
    """-log sigmoid(beta (log p(chosen) - log p(rejected))) and the chosen answer's likelihood (arXiv 2401.08417)."""

    def __init__(self, method: Cpo) -> None:
        self.method = method

    def loss(self, model: ForwardModel, micro_batch: MicroBatch, statistics: dict[str, float]) -> LossSum:
        logprobs, means = _logprobs_and_means(model, micro_batch)
        rewards = logprobs.times(self.method.beta)
        match self.method.loss:
            case "sigmoid":
                losses_P = smoothed_logistic(rewards.difference(), self.method.label_smoothing)
            case "hinge":
                losses_P = hinge(rewards.difference())
            case "ipo":
                losses_P = squared_to_target(means.difference(), self.method.beta)
        return _with_likelihood(losses_P, means, self.method.sft_weight, pair_metrics(rewards, logprobs))


def _logprobs_and_means(model: ForwardModel, batch: MicroBatch) -> tuple[Pairs, Pairs]:
    sums = Pairs.of(answer_sums(model.logprobs(batch), batch))
    return sums, sums / Pairs.of(answer_lengths(batch))


def _with_likelihood(losses_P: Tensor, means: Pairs, weight: float, metrics: dict[str, Ratio]) -> LossSum:
    if not weight:
        return LossSum(losses_P.sum(), metrics)
    nll_P = -means.chosen_P
    return LossSum((losses_P + weight * nll_P).sum(), metrics | {"nll_loss": Ratio.mean(nll_P)})


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0 without losing digits at either end (Maechler 2012).

    A mean log-probability of exactly 0 has no odds; the smallest step below it stands for it.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near_zero = x > -0.6931471805599453
    inner = torch.where(near_zero, x, x.new_tensor(-1.0))
    outer = torch.where(near_zero, x.new_tensor(-1.0), x)
    return torch.where(near_zero, (-torch.expm1(inner)).log(), torch.log1p(-outer.exp()))
