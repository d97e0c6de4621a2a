"""Random documents of unequal length, the same every time: enough for a tiny model to learn by heart."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gym_data.store import Document
from gym_trainer.fast.packing import PackedLayout
from gym_trainer.loop.batch import Row, make_micro_batch

_LENGTHS = (12, 33, 9, 21)
_FIRST_ID, _LAST_ID = 3, 258  # every id between is a byte of the tiny tokenizer


class RandomRows:
    """Rows as the loop reads them."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.lengths_N: np.ndarray = np.array(_LENGTHS)
        self.documents: list[Document] = [
            Document(
                ids=random.integers(_FIRST_ID, _LAST_ID, length).astype(np.uint32),
                loss_mask=np.ones(length, dtype=np.uint8),
                row=number,
            )
            for number, length in enumerate(_LENGTHS, start=1)
        ]

    def __len__(self) -> int:
        return len(self.documents)

    def row(self, index: int) -> Row:
        return Row(index=index, documents=(self.documents[index],))

    def describe(self, index: int) -> str:
        return f"random row {index + 1}"

    def tensors(self) -> list[torch.Tensor]:
        """Each document's ids, int64 [L]."""
        return [torch.from_numpy(document.ids.astype(np.int64)) for document in self.documents]

    @torch.no_grad()
    def packed_logits(self, model: Any) -> list[torch.Tensor]:
        """Each document's logits float64 [L, V], all in one packed row."""
        layout = PackedLayout.from_lengths(_LENGTHS)
        ids = torch.cat(self.tensors())[None]
        logits_TV = model(input_ids=ids, use_cache=False, **layout.model_kwargs()).logits[0].double()
        return list(logits_TV.split(_LENGTHS))

    @torch.no_grad()
    def padded_logits(self, model: Any) -> list[torch.Tensor]:
        """The same, each document in a padded row of its own."""
        batch = make_micro_batch([self.row(i) for i in range(len(self))], layout="padded", device="cpu")
        logits_DLV = model(**batch.model_inputs()).logits.double()
        return [logits_DLV[number, :length] for number, length in enumerate(_LENGTHS)]
