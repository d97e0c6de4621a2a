"""Kahneman-Tversky optimisation: good and bad answers, each against a reference point of the whole step.

Shapes: N documents of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gym_data import Document, TokenStore
from gym_data.store import DocumentRole
from gym_sdk.spec import Kto
from gym_trainer.loop.batch import MicroBatch, Row, RowSource, StepBatch, StoreRows
from gym_trainer.loop.forward import ForwardModel
from gym_trainer.objectives.base import LossSum, Objective, Ratio, Start, Unit
from gym_trainer.objectives.logprobs import answer_sums
from gym_trainer.objectives.reference import Reference

_KL = "kl"


class KtoObjective(Objective):
    """weight x (1 - sigmoid(+-(reward - z))), with z the policy's divergence from the reference (arXiv 2402.01306,
    equation 8).

    z is the mean log-ratio, not below 0, of prompts with answers to other prompts: over the whole step and all ranks,
    before any gradient, so that it does not depend on micro-batches.
    """

    unit: ClassVar[Unit] = "sequence"

    def __init__(self, method: Kto, reference: Reference, *, seed: int) -> None:
        self.method = method
        self.reference = reference
        self.seed = seed

    def rows(self, store: TokenStore) -> RowSource:
        return MismatchedRows(store, seed=self.seed)

    def start(self, start: Start, rows: Sequence[RowSource]) -> list[RowSource]:
        return self.reference.start(start, rows, _logprobs)

    def statistics_rows(self, step: StepBatch) -> Sequence[Row]:
        """The mismatched answers alone, with what is known of them."""
        return [
            replace(
                row,
                documents=row.statistics_documents,
                statistics_documents=(),
                document_values={name: values[len(row.documents) :] for name, values in row.document_values.items()},
            )
            for row in step.rows
        ]

    def statistics(self, model: ForwardModel, micro_batches: Iterator[MicroBatch]) -> dict[str, Ratio]:
        total, count = torch.zeros((), dtype=torch.float64), 0
        for batch in micro_batches:
            total += self._log_ratios(model, batch)[0].sum().cpu()
            count += batch.num_documents
        return {_KL: Ratio(total, torch.tensor(float(count)))}

    def loss(self, model: ForwardModel, micro_batch: MicroBatch, statistics: dict[str, float]) -> LossSum:
        method, kl = self.method, max(0.0, statistics[_KL])
        log_ratios_N, logprobs_N = self._log_ratios(model, micro_batch)
        rewards_N = method.beta * log_ratios_N
        good_N = torch.tensor(
            [document.role == DocumentRole.DESIRABLE for row in micro_batch.rows for document in row.documents],
            device=rewards_N.device,
        )
        signs_N = torch.where(good_N, 1.0, -1.0)
        weights_N = torch.where(good_N, method.desirable_weight, method.undesirable_weight)
        losses_N = weights_N * (1 - (signs_N * (rewards_N - method.beta * kl)).sigmoid())
        metrics = {
            "rewards/chosen": Ratio.mean(rewards_N[good_N]),
            "rewards/rejected": Ratio.mean(rewards_N[~good_N]),
            "logps/chosen": Ratio.mean(logprobs_N[good_N]),
            "logps/rejected": Ratio.mean(logprobs_N[~good_N]),
            _KL: Ratio.mean(torch.full_like(rewards_N, kl)),
        }
        return LossSum(losses_N.sum(), metrics)

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        """The difference of the means: there are no pairs to average over."""
        if "rewards/chosen" not in metrics or "rewards/rejected" not in metrics:
            return {}
        return {"rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"]}

    def _log_ratios(self, model: ForwardModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Of the policy to the reference, and of the policy alone: [N]."""
        reference_N = self.reference.logprobs(model, batch, _logprobs)
        logprobs_N = _logprobs(model, batch)
        return logprobs_N - reference_N, logprobs_N


class MismatchedRows(StoreRows):
    """Labelled answers, each with its prompt beside an answer to another prompt.

    Which other one is fixed by the seed alone, not by the step, so that ranks and a resumed run agree on it.
    """

    def __init__(self, store: TokenStore, *, seed: int) -> None:
        super().__init__(store)
        self.max_length: int = int(np.max(store.lengths, initial=1))
        self._order = np.random.default_rng((seed, 1)).permutation(len(self))
        self._place = np.argsort(self._order)

    def row(self, index: int) -> Row:
        row = super().row(index)
        return replace(row, statistics_documents=(self._mismatched(index),))

    def _mismatched(self, index: int) -> Document:
        own = self.store.group(index)[0]
        prompt = _prompt(own)
        other = own
        for step in range(1, len(self)):
            other = self.store.group(int(self._order[(self._place[index] + step) % len(self)]))[0]
            if not np.array_equal(_prompt(other), prompt):
                break
        answer = other.ids[len(_prompt(other)) :]
        ids = np.concatenate([prompt, answer])[: self.max_length]
        mask = np.concatenate([np.zeros(len(prompt), np.uint8), other.loss_mask[len(other.ids) - len(answer) :]])
        return Document(ids, mask[: self.max_length], own.row, own.role)


def _prompt(document: Document) -> np.ndarray:
    """What stands before the first trained token."""
    return document.ids[: int(np.argmax(document.loss_mask))]


def _logprobs(model: ForwardModel, batch: MicroBatch) -> Tensor:
    return answer_sums(model.logprobs(batch), batch)
