"""Likelihood of the trained tokens: supervised fine-tuning and continued pretraining."""

from __future__ import annotations

from contextlib import nullcontext
from typing import ClassVar, Literal

import torch

from gym_data.report import DataReport
from gym_sdk.errors import DataError, Where
from gym_trainer.loop.batch import MicroBatch
from gym_trainer.loop.forward import ForwardModel
from gym_trainer.objectives.base import LossSum, Objective, Ratio, Unit
from gym_trainer.objectives.neftune import noisy_embeddings

_TEXT_FORMATS = ("text", "tokens")


class SftObjective(Objective):
    """-log p(token | tokens before it), summed over trained tokens, divided by their number in the step.

    With `loss_kind="dft"` each token's loss is multiplied by its probability, taken as a constant: the gradient of -p
    instead of -log p (arXiv 2508.05629, equation 9).
    """

    unit: ClassVar[Unit] = "token"

    def __init__(self, *, loss_kind: Literal["nll", "dft"] = "nll", neftune_alpha: float = 0.0) -> None:
        self.loss_kind = loss_kind
        self.neftune_alpha = neftune_alpha

    def loss(self, model: ForwardModel, micro_batch: MicroBatch, statistics: dict[str, float]) -> LossSum:
        trains = torch.is_grad_enabled()
        noise = noisy_embeddings(model, micro_batch, self.neftune_alpha) if self.neftune_alpha and trains else None
        with noise or nullcontext():
            if self.loss_kind == "dft":
                return self._dft(model, micro_batch)
            result = model.cross_entropy(micro_batch)
        accuracy = Ratio(total=result.num_correct, count=torch.tensor(result.num_tokens))
        return LossSum(loss=result.loss_sum, metrics={"token_accuracy": accuracy})

    def _dft(self, model: ForwardModel, micro_batch: MicroBatch) -> LossSum:
        logprobs_T = model.logprobs(micro_batch)
        num_tokens = torch.tensor(sum(row.num_trained_tokens for row in micro_batch.rows))
        loss = -(logprobs_T.detach().exp() * logprobs_T).sum()
        return LossSum(loss=loss, metrics={"nll": Ratio(-logprobs_T.detach().sum(), num_tokens)})


def require_text(report: DataReport) -> None:
    """Raise DataError where rows of a pretraining run are chats: their template would be learned as plain text."""
    for source in report.sources:
        if source["format"] not in _TEXT_FORMATS:
            raise DataError(
                f"pretraining reads plain text, and these rows are {source['format']}",
                where=Where(file=str(source["source"])),
                hint="fine-tune on them with method: {kind: sft}; for pretraining give txt files, or rows with a "
                '"text" column',
            )
