"""Rows of a classifier: chats whose last answer is the name of a class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gym_data import Document, Tokenizer, TokenStore
from gym_sdk.errors import DataError, Where
from gym_trainer.loop.batch import Row

LABEL = "label"
_MOST_FOUND = 1000
"""More distinct answers than this are no classes."""


@dataclass(frozen=True)
class Classes:
    """The classes in the order of the head's outputs."""

    names: tuple[str, ...]
    tokenizer: Tokenizer
    files: Mapping[str, Sequence[str]]

    @classmethod
    def of(
        cls, labels: Sequence[str], store: TokenStore, tokenizer: Tokenizer, files: Mapping[str, Sequence[str]]
    ) -> Classes:
        """Those that are given, or the answers of the training rows.

        `files` are what the rows of a store were read from, by the name of the store's folder (`train`, `eval`).

        Raises:
            DataError: fewer than two classes, or answers that are texts rather than classes.
        """
        if labels:
            return cls(tuple(labels), tokenizer, files)
        where = Where(file=files["train"][0])
        found = Counter(answer(store.group(index)[0], tokenizer) for index in range(store.num_groups))
        if len(found) < 2:
            raise DataError(
                f"every row has the same answer, {next(iter(found))!r}: there is nothing to tell apart",
                where=where,
                hint="add rows of another class",
            )
        if len(found) > _MOST_FOUND or (len(found) > 10 and len(found) > store.num_groups / 2):
            raise DataError(
                f"{len(found)} different answers in {store.num_groups} rows are texts, not classes",
                where=where,
                hint="the last answer of a row must be the name of its class; if these are the classes, list them in "
                "method.labels",
            )
        return cls(tuple(sorted(found)), tokenizer, files)

    def number(self, document: Document, store: TokenStore) -> int:
        """The class of a row of a store.

        Raises:
            DataError: an answer that is no class.
        """
        name = answer(document, self.tokenizer)
        if name not in self.names:
            shown = ", ".join(self.names[:8]) + (", ..." if len(self.names) > 8 else "")
            files = self.files[store.folder.name]
            place = Where(file=files[0], line=document.row) if len(files) == 1 else None
            among = "" if place else f"row {document.row} of one of {', '.join(files)}: "
            raise DataError(
                f"{among}the answer {name!r} is none of the classes ({shown})",
                where=place,
                hint="correct the row, or add the class to method.labels and to the training rows",
            )
        return self.names.index(name)


class ClassRows:
    """Prompts with the number of their class."""

    def __init__(self, store: TokenStore, classes: Classes) -> None:
        """Reads every answer once, so that a row that is no class is found before training."""
        self.store = store
        self._starts = np.array([answer_start(store.group(index)[0].loss_mask) for index in range(store.num_groups)])
        self._numbers = [classes.number(store.group(index)[0], store) for index in range(store.num_groups)]
        self.lengths_N: np.ndarray = self._starts

    def __len__(self) -> int:
        return len(self.lengths_N)

    def row(self, index: int) -> Row:
        whole = self.store.group(index)[0]
        start = int(self._starts[index])
        prompt = Document(whole.ids[:start], np.zeros(start, np.uint8), whole.row, whole.role)
        return Row(index=index, documents=(prompt,), document_values={LABEL: (float(self._numbers[index]),)})

    def describe(self, index: int) -> str:
        return f"row {self.store.group(index)[0].row}"


def answer_start(loss_mask: np.ndarray) -> int:
    """Where the last run of trained tokens begins, in the uint8 mask [L] of a document."""
    edges = np.flatnonzero(np.diff(loss_mask.astype(np.int8), prepend=0) == 1)
    return int(edges[-1])


def answer(document: Document, tokenizer: Tokenizer) -> str:
    """The text of the last answer, without what ends it."""
    start = answer_start(document.loss_mask)
    trained = document.ids[start:][document.loss_mask[start:] == 1]
    return tokenizer.decode(trained.tolist(), skip_special=True).strip()
