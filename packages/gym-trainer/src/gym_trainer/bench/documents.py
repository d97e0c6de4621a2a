"""The documents of a measured step: random tokens of given lengths, the last part of each trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_data import Document
from gym_trainer.loop.batch import StoreRows


class Documents:
    """A token store in memory."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents: list[Document] = list(documents)
        self.lengths: NDArray[np.int64] = np.array([len(document.ids) for document in documents], np.int64)
        self.group_lengths: NDArray[np.int64] = self.lengths

    def __len__(self) -> int:
        return len(self.documents)

    def group(self, index: int) -> tuple[Document, ...]:
        """One document, by itself."""
        return (self.documents[index],)


def documents(lengths: Sequence[int], prompts: Sequence[int], vocab_size: int) -> list[Document]:
    """`prompts` are the tokens at the beginning of each document that are not trained."""
    random = np.random.default_rng(1)
    made = []
    for number, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        mask = np.ones(length, np.uint8)
        mask[:prompt] = 0
        made.append(Document(random.integers(0, vocab_size, length).astype(np.uint32), mask, number))
    return made


def rows_of(made: Sequence[Document]) -> StoreRows:
    """As the loop takes them."""
    return StoreRows(Documents(made))  # type: ignore[arg-type]  # it reads what Documents has


def plain_rows(made: Sequence[Document]) -> list[dict[str, Any]]:
    """As other trainers take them."""
    return [
        {
            "input_ids": document.ids.tolist(),
            "labels": np.where(document.loss_mask == 1, document.ids.astype(np.int64), -100).tolist(),
        }
        for document in made
    ]
