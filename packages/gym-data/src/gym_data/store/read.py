"""Memory-mapped tokens, loss masks and document boundaries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from gym_sdk.errors import DataError, Where

STORE_VERSION = 2
FILES: dict[str, Any] = {
    "tokens": np.uint32,
    "loss_mask": np.uint8,
    "offsets": np.int64,
    "rows": np.int64,
    "roles": np.uint8,
    "groups": np.int64,
}


class DocumentRole(IntEnum):
    """A document's part in its group."""

    PLAIN = 0
    CHOSEN = 1
    REJECTED = 2
    DESIRABLE = 3
    UNDESIRABLE = 4


@dataclass(frozen=True, slots=True)
class Document:
    """One sequence: `ids` [T] uint32, `loss_mask` [T] uint8, the line or row it came from, its part in its group."""

    ids: NDArray[np.uint32]
    loss_mask: NDArray[np.uint8]
    row: int
    role: DocumentRole = DocumentRole.PLAIN

    def copied(self) -> Document:
        """The same in memory of its own, not the store's."""
        return replace(self, ids=np.array(self.ids), loss_mask=np.array(self.loss_mask))

    def part(self, start: int, stop: int) -> Document:
        """The tokens `[start, stop)` as a document."""
        return replace(self, ids=self.ids[start:stop], loss_mask=self.loss_mask[start:stop])


class TokenStore:
    """Documents side by side: `tokens` uint32 [T], `loss_mask` uint8 [T], `offsets` int64 [N+1].

    Documents that must stay together (chosen and rejected) form a group; they are neighbours. `groups` int64 [G+1] says
    at which document each group starts, `roles` uint8 [N] what part each document has. Without pairs each document is
    a group of its own.
    """

    def __init__(self, folder: str | Path) -> None:
        """Opens a store; its arrays stay on disk. Raises DataError when it is incomplete."""
        self.folder: Path = Path(folder)
        try:
            self.meta: dict[str, Any] = orjson.loads((self.folder / "store.json").read_bytes())
            if self.meta["version"] != STORE_VERSION:
                raise ValueError(f"version {self.meta['version']}, not {STORE_VERSION}")
            arrays = {name: self._map(name, dtype) for name, dtype in FILES.items()}
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"the token store is not complete: {error}", where=Where(file=str(folder))) from None
        self.tokens: NDArray[np.uint32] = arrays["tokens"]
        self.loss_mask: NDArray[np.uint8] = arrays["loss_mask"]
        self.offsets: NDArray[np.int64] = arrays["offsets"]
        self.rows: NDArray[np.int64] = arrays["rows"]
        self.roles: NDArray[np.uint8] = arrays["roles"]
        self.groups: NDArray[np.int64] = arrays["groups"]

    def _map(self, name: str, dtype: Any) -> NDArray[Any]:
        path = self.folder / f"{name}.bin"
        size = self.meta["sizes"][name]
        if path.stat().st_size != size * np.dtype(dtype).itemsize:
            raise ValueError(f"{name}.bin has {path.stat().st_size} bytes")
        return np.memmap(path, dtype, "r", shape=(size,)) if size else np.zeros(0, dtype)

    def load(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Elements `[start, stop)` of an array, read into memory: a mapped file's pages would stay with the process."""
        dtype = np.dtype(FILES[name])
        return np.fromfile(self.folder / f"{name}.bin", dtype, stop - start, offset=start * dtype.itemsize)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Document:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        start, stop = int(self.offsets[index]), int(self.offsets[index + 1])
        role = DocumentRole(int(self.roles[index]))
        return Document(self.tokens[start:stop], self.loss_mask[start:stop], int(self.rows[index]), role)

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[N] tokens of each document."""
        return np.diff(self.offsets)

    @cached_property
    def group_lengths(self) -> NDArray[np.int64]:
        """[G] tokens of each group, all its documents together."""
        return np.diff(self.offsets[self.groups])

    @property
    def num_groups(self) -> int:
        """Groups: rows of a batch."""
        return len(self.groups) - 1

    def group(self, index: int) -> tuple[Document, ...]:
        """The documents of a group: one, or chosen and rejected."""
        return tuple(self[document] for document in range(int(self.groups[index]), int(self.groups[index + 1])))

    def describe(self, index: int) -> str:
        """Where a document came from, for a message to a person."""
        return f"row {int(self.rows[index])}"

    @property
    def num_tokens(self) -> int:
        """All tokens."""
        return len(self.tokens)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens that are training targets."""
        return int(self.meta["num_trained_tokens"])
