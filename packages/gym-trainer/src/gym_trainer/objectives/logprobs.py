"""From the tokens' log-probabilities to those of whole answers.

Shapes: T positions of a micro-batch, N its documents, P its pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gym_trainer.loop.batch import IGNORED, MicroBatch


def answer_sums(values_T: Tensor, batch: MicroBatch) -> Tensor:
    """A value for each token, such as its log-probability, added up over each document's trained tokens: [N].

    In float64 where the device has it: rewards are small differences of sums of some hundreds.
    """
    wide = torch.float32 if values_T.device.type == "mps" else torch.float64
    sums_N = torch.zeros(batch.num_documents, dtype=wide, device=values_T.device)
    return sums_N.index_add(0, batch.document_ids_T.clamp(min=0), values_T.to(wide))


def answer_lengths(batch: MicroBatch) -> Tensor:
    """Trained tokens of each document: int64 [N]."""
    labelled_T = (batch.labels_T != IGNORED).long().to(batch.document_ids_T.device)
    lengths_N = torch.zeros(batch.num_documents, dtype=torch.int64, device=labelled_T.device)
    return lengths_N.index_add(0, batch.document_ids_T.clamp(min=0), labelled_T)


def excess_weights(batch: MicroBatch, lengths_N: Tensor, alpha: float) -> Tensor:
    """LD-DPO's weights [T]: 1 for the first tokens of an answer, as many as the pair's shorter answer has, then
    `alpha` (arXiv 2409.06411, equation 10)."""
    labelled_T = (batch.labels_T != IGNORED).long().to(lengths_N.device)
    documents_T = batch.document_ids_T.clamp(min=0)
    before_N = lengths_N.cumsum(0) - lengths_N
    place_T = labelled_T.cumsum(0) - before_N[documents_T]
    shared_N = lengths_N.view(-1, 2).min(dim=1).values.repeat_interleave(2)
    return torch.where(place_T <= shared_N[documents_T], 1.0, alpha)


@dataclass(frozen=True, slots=True)
class Pairs:
    """A number for each chosen and each rejected answer: [P] each."""

    chosen_P: Tensor
    rejected_P: Tensor

    @classmethod
    def of(cls, values_N: Tensor) -> Pairs:
        """A row of a preference method is chosen and rejected, side by side in this order."""
        return cls(values_N[0::2], values_N[1::2])

    def difference(self) -> Tensor:
        """Chosen minus rejected: [P]."""
        return self.chosen_P - self.rejected_P

    def __sub__(self, other: Pairs) -> Pairs:
        return Pairs(self.chosen_P - other.chosen_P, self.rejected_P - other.rejected_P)

    def __truediv__(self, other: Pairs) -> Pairs:
        return Pairs(self.chosen_P / other.chosen_P, self.rejected_P / other.rejected_P)

    def times(self, factor: float) -> Pairs:
        return Pairs(self.chosen_P * factor, self.rejected_P * factor)
