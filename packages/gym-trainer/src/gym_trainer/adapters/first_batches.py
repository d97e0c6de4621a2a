"""The first rows of the data as plain batches, for an adapter that starts from what the layers see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from gym_trainer.loop.batch import make_micro_batch

if TYPE_CHECKING:
    from gym_trainer.loop.batch import RowSource

_NUM_ROWS = 64
_BATCH_SIZE = 8


def first_batches(rows: RowSource, device: torch.device | str) -> Iterator[dict[str, torch.Tensor]]:
    """Padded input ids and masks, int64 [rows, L]."""
    indexes = range(min(_NUM_ROWS, len(rows)))
    for start in range(0, len(indexes), _BATCH_SIZE):
        chosen = [rows.row(index) for index in indexes[start : start + _BATCH_SIZE]]
        batch = make_micro_batch(chosen, layout="padded", device=device)
        assert batch.attention_mask is not None
        yield {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
