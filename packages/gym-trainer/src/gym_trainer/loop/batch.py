"""Rows, the optimizer step they belong to, and the micro-batches that a step is computed in.

Shapes: N rows of a data set, D documents of a micro-batch, T positions of a micro-batch (R x L when padded).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from gym_data import TokenStore
from gym_data.store import DocumentRole
from gym_trainer.fast.packing import PackedLayout
from gym_trainer.fast.prefixes import Prefix

IGNORED = -100
"""The label of a position that is not trained, as everywhere in PyTorch."""

Layout = Literal["packed", "shared", "padded"]
"""`packed`: documents side by side in one row of the model, kept apart by the attention. `shared`: the same, and what
the documents of a row (a pair's answers) begin with alike stands there once; for attention that knows of it. `padded`:
one document a row of the model, for architectures that cannot keep them apart."""


class Document(Protocol):
    """A run of tokens that sees nothing outside itself."""

    @property
    def ids(self) -> np.ndarray:
        """uint32 [L]."""
        ...

    @property
    def loss_mask(self) -> np.ndarray:
        """uint8 [L]; 1 where the token is trained, that is, predicted from those before it."""
        ...

    @property
    def role(self) -> DocumentRole:
        """Its part in the row: plain, chosen or rejected, good or bad."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """What is never split between micro-batches: one document for SFT, chosen and rejected for a preference pair."""

    index: int
    documents: tuple[Document, ...]
    statistics_documents: tuple[Document, ...] = ()
    """Documents that only the objective's step-level statistics see, such as KTO's mismatched answers."""
    document_values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Numbers that a method needs beside the tokens, one for each of `documents` and `statistics_documents`."""

    written_by_model: bool = False
    """The answer is the model's own, and no example to imitate."""

    @property
    def num_tokens(self) -> int:
        return sum(len(document.ids) for document in self.documents)

    @property
    def num_trained_tokens(self) -> int:
        """Positions with a label. A document's first token has nothing before it to be predicted from."""
        return sum(int(np.count_nonzero(document.loss_mask[1:])) for document in self.documents)

    def num_positions(self, layout: Layout) -> int:
        """Of the model's row that the documents take."""
        return self.num_tokens - (sum(self.prefix_lengths()) if layout == "shared" else 0)

    def prefix_lengths(self) -> list[int]:
        """How many tokens each document shares with the first one: positions without a label in either, whose hidden
        states are therefore the same and give the loss nothing of their own."""
        first = self.documents[0]
        return [0, *(_shared_length(first, other) for other in self.documents[1:])]


class RowSource(Protocol):
    """Rows by number, with their lengths known beforehand."""

    lengths_N: np.ndarray

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row: ...

    def describe(self, index: int) -> str:
        """Where the row came from, for a message to a person."""
        ...


class StoreRows:
    """Every group of a token store as a row: one document, or what must stay together."""

    def __init__(self, store: TokenStore) -> None:
        self.store = store
        self.lengths_N: np.ndarray = np.asarray(store.group_lengths)

    def __len__(self) -> int:
        return len(self.lengths_N)

    def row(self, index: int) -> Row:
        return Row(index=index, documents=self.store.group(index))

    def describe(self, index: int) -> str:
        return f"row {self.store.group(index)[0].row}"


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step: the rows of all ranks by number, and this rank's own rows."""

    epoch: int
    number: int
    """Counted from 0 within the epoch."""
    row_indexes: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_trained_tokens(self) -> int:
        return sum(row.num_trained_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole rows, as tensors on the device of the model.

    `labels_T` is already shifted: position t holds the token that t predicts, or IGNORED. Positions are those of
    `input_ids` in reading order, whatever the layout.
    """

    rows: tuple[Row, ...]
    layout: Layout
    input_ids: Tensor
    """int64 [1, T] packed, [D, L] padded."""
    position_ids: Tensor
    """int64, shaped like input_ids; each token's place in its document."""
    attention_mask: Tensor | None
    """int64 [D, L] padded; None packed."""
    labels_T: Tensor
    """int64; stays on the host, where choosing the labelled positions costs no wait for the device."""
    document_ids_T: Tensor
    """int64; which document a position belongs to, -1 for padding. What documents share belongs to the first."""
    document_rows_D: Tensor
    """int64; the position of each document's row in `rows`."""
    last_positions_D: Tensor
    """int64; where each document's last token lies; on the host."""
    packed: PackedLayout | None
    """Where the documents lie; None padded."""
    num_tokens: int
    """Tokens of documents, without padding."""

    @property
    def num_documents(self) -> int:
        return len(self.document_rows_D)

    def document_values(self, name: str) -> Tensor:
        """The documents' numbers under `name`, float64 [D]."""
        values = [value for row in self.rows for value in row.document_values[name][: len(row.documents)]]
        return torch.tensor(values, dtype=torch.float64, device=self.input_ids.device)

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for a transformers model.

        The packed form carries the document boundaries both as restarting positions, from which transformers' masks
        keep documents apart, and as cumulative lengths, which the attention of `gym_trainer.fast` reads.
        """
        inputs: dict[str, Any] = {"input_ids": self.input_ids, "use_cache": False}
        if self.packed is not None:
            return inputs | self.packed.model_kwargs()
        # Padding follows each document, so the model's own positions are right, also where they do not start at 0.
        return inputs | {"attention_mask": self.attention_mask}


def shifted_labels(document: Document) -> np.ndarray:
    """int64 [L]: the next token where it is trained, IGNORED elsewhere and at the document's last position."""
    labels = np.full(len(document.ids), IGNORED, dtype=np.int64)
    trained = np.asarray(document.loss_mask[1:]) != 0
    labels[:-1][trained] = np.asarray(document.ids[1:])[trained]
    return labels


def _shared_length(first: Document, other: Document) -> int:
    """Tokens that two documents begin with alike, up to the last one before which neither is trained.

    The token before an answer stays in both: it predicts the first of each.
    """
    most = min(len(first.ids), len(other.ids) - 1)
    differ = np.flatnonzero(np.asarray(first.ids[:most]) != np.asarray(other.ids[:most]))
    lengths = [most, *differ[:1].tolist()]
    for document in (first, other):
        lengths += np.flatnonzero(np.asarray(document.loss_mask[1 : most + 1]))[:1].tolist()
    return min(lengths)


def make_micro_batch(rows: Sequence[Row], *, layout: Layout, device: torch.device | str) -> MicroBatch:
    """Lay whole rows out for one forward pass."""
    documents = [document for row in rows for document in row.documents]
    prefixes = _prefixes(rows) if layout == "shared" else [Prefix(0, 0)] * len(documents)
    own = [document.ids[prefix.length :] for document, prefix in zip(documents, prefixes, strict=True)]
    lengths = [len(ids) for ids in own]
    document_rows = [number for number, row in enumerate(rows) for _ in row.documents]
    labels = [shifted_labels(document)[prefix.length :] for document, prefix in zip(documents, prefixes, strict=True)]
    packed = attention_mask = None
    if layout != "padded":
        packed = PackedLayout.from_lengths(lengths, device, prefixes=prefixes)
        position_ids = packed.position_ids
        input_ids = np.concatenate(own).astype(np.int64)[None]
        labels_T = np.concatenate(labels)
        document_ids_T = np.repeat(np.arange(len(documents)), lengths)
        last_positions_D = np.cumsum(lengths) - 1
    else:
        shape = (len(documents), max(lengths))
        inside = np.arange(shape[1])[None] < np.array(lengths)[:, None]
        input_ids, labels_T = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        for number, ids in enumerate(own):
            input_ids[number, : lengths[number]] = ids
            labels_T[number, : lengths[number]] = labels[number]
        position_ids = torch.from_numpy(np.where(inside, np.arange(shape[1])[None], 0)).to(device)
        labels_T = labels_T.reshape(-1)
        document_ids_T = np.where(inside, np.arange(shape[0])[:, None], -1).reshape(-1)
        attention_mask = torch.from_numpy(inside.astype(np.int64)).to(device)
        last_positions_D = np.arange(shape[0]) * shape[1] + np.array(lengths) - 1
    return MicroBatch(
        rows=tuple(rows),
        layout=layout,
        input_ids=torch.from_numpy(input_ids).to(device, non_blocking=True),
        position_ids=position_ids,
        attention_mask=attention_mask,
        labels_T=torch.from_numpy(labels_T),
        document_ids_T=torch.from_numpy(document_ids_T).to(device, non_blocking=True),
        document_rows_D=torch.tensor(document_rows, device=device),
        last_positions_D=torch.from_numpy(last_positions_D),
        packed=packed,
        num_tokens=sum(len(document.ids) for document in documents),
    )


def _prefixes(rows: Sequence[Row]) -> list[Prefix]:
    """What each document takes from the first of its row."""
    prefixes: list[Prefix] = []
    for row in rows:
        first = len(prefixes)
        prefixes += [Prefix(first, length) for length in row.prefix_lengths()]
    return prefixes
