"""Supervised fine-tuning: next-token cross-entropy over the trained tokens of the whole step."""

from __future__ import annotations

from typing import ClassVar

import torch

from gym_trainer.loop.batch import MicroBatch, StepBatch
from gym_trainer.loop.forward import ForwardModel
from gym_trainer.objectives.base import LossSum, Objective, Ratio, Unit


class SftObjective(Objective):
    """-log p(token | tokens before it), summed over trained tokens, divided by their number in the step."""

    unit: ClassVar[Unit] = "token"

    def normaliser(self, step: StepBatch) -> float:
        return float(step.num_trained_tokens)

    def loss(self, model: ForwardModel, micro_batch: MicroBatch, statistics: dict[str, float]) -> LossSum:
        result = model.cross_entropy(micro_batch)
        accuracy = Ratio(total=result.num_correct, count=torch.tensor(result.num_tokens))
        return LossSum(loss=result.loss_sum, metrics={"token_accuracy": accuracy})
