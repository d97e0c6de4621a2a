"""Methods that score a whole sequence by a linear head on its last hidden state: reward models, classifiers.

Shapes: N documents of a micro-batch, P its pairs, C classes.
"""

from __future__ import annotations

from typing import ClassVar

from torch.nn.functional import cross_entropy, logsigmoid

from gym_data import TokenStore
from gym_sdk.spec import Reward
from gym_trainer.loop.batch import MicroBatch, RowSource
from gym_trainer.loop.forward import ForwardModel
from gym_trainer.objectives.base import LossSum, Objective, Ratio, Unit
from gym_trainer.objectives.classes import LABEL, Classes, ClassRows
from gym_trainer.objectives.logprobs import Pairs
from gym_trainer.objectives.preference import PairObjective, reward_metrics


class RewardObjective(PairObjective):
    """-log sigmoid(r(chosen) - r(rejected)) + centering (r(chosen) + r(rejected))^2 (arXiv 2203.02155, 2312.09244)."""

    scores: tuple[str, ...] | None = ("reward",)

    def __init__(self, method: Reward) -> None:
        self.centering: float = method.centering

    def loss(self, model: ForwardModel, micro_batch: MicroBatch, statistics: dict[str, float]) -> LossSum:
        rewards = Pairs.of(model.scores(micro_batch)[:, 0])
        losses_P = -logsigmoid(rewards.difference())
        if self.centering:
            losses_P = losses_P + self.centering * (rewards.chosen_P + rewards.rejected_P).square()
        return LossSum(losses_P.sum(), reward_metrics(rewards))


class ClassificationObjective(Objective):
    """-log p(class of the row), over rows."""

    unit: ClassVar[Unit] = "sequence"

    def __init__(self, classes: Classes) -> None:
        self.classes = classes
        self.scores: tuple[str, ...] | None = classes.names

    def rows(self, store: TokenStore) -> RowSource:
        return ClassRows(store, self.classes)

    def loss(self, model: ForwardModel, micro_batch: MicroBatch, statistics: dict[str, float]) -> LossSum:
        scores_NC = model.scores(micro_batch)
        labels_N = micro_batch.document_values(LABEL).long()
        accuracy = Ratio.mean((scores_NC.argmax(-1) == labels_N).double())
        return LossSum(cross_entropy(scores_NC, labels_N, reduction="sum"), {"accuracy": accuracy})
