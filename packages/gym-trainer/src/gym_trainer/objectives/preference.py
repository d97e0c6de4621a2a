"""What the methods over pairs have in common: the losses of a margin, and the metrics the field knows them by.

Shapes: P pairs of a micro-batch.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from gym_trainer.objectives.base import Objective, Ratio, Unit
from gym_trainer.objectives.logprobs import Pairs


class PairObjective(Objective):
    """Averages over pairs."""

    unit: ClassVar[Unit] = "pair"


def smoothed_logistic(margin_P: Tensor, smoothing: float) -> Tensor:
    """-log sigmoid of the margin, a share `smoothing` of it the other way round (conservative DPO)."""
    if smoothing == 0:
        return -logsigmoid(margin_P)
    return -(1 - smoothing) * logsigmoid(margin_P) - smoothing * logsigmoid(-margin_P)


def robust_logistic(margin_P: Tensor, smoothing: float) -> Tensor:
    """Unbiased under labels that are wrong at the rate `smoothing` (arXiv 2403.00409, equation 12)."""
    clean_P = (1 - smoothing) * logsigmoid(margin_P)
    flipped_P = smoothing * logsigmoid(-margin_P)
    return -(clean_P - flipped_P) / (1 - 2 * smoothing)


def hinge(margin_P: Tensor) -> Tensor:
    """Nothing once the margin is 1 (SLiC, arXiv 2305.10425)."""
    return torch.relu(1 - margin_P)


def squared_to_target(difference_P: Tensor, tau: float) -> Tensor:
    """The squared distance of a difference of log-ratios from 1 / (2 tau) (IPO, arXiv 2310.12036, equation 17)."""
    return (difference_P - 1 / (2 * tau)).square()


def reward_metrics(rewards: Pairs) -> dict[str, Ratio]:
    """Means over pairs: rewards, their margin, and how often the chosen one is higher."""
    margins_P = rewards.difference().detach()
    return {
        "rewards/chosen": Ratio.mean(rewards.chosen_P),
        "rewards/rejected": Ratio.mean(rewards.rejected_P),
        "rewards/margins": Ratio.mean(margins_P),
        "rewards/accuracies": Ratio.mean((margins_P > 0).double()),
    }


def pair_metrics(rewards: Pairs, logprobs: Pairs) -> dict[str, Ratio]:
    """The implicit rewards' metrics, and the answers' mean log-probabilities."""
    return reward_metrics(rewards) | {
        "logps/chosen": Ratio.mean(logprobs.chosen_P),
        "logps/rejected": Ratio.mean(logprobs.rejected_P),
    }
