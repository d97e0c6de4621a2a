"""Writing a token store, document by document, in bounded memory."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from gym_data.store.read import FILES, STORE_VERSION, TokenStore

GROUPS_AT_ONCE = 4096
"""Copied in one piece: 40 MB of rows of 2,048 tokens."""


class StoreWriter:
    """Writes into a folder of its own; the store can be opened once `close` has written `store.json`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._files = {name: (folder / f"{name}.bin").open("wb") for name in FILES}
        self._sizes = dict.fromkeys(FILES, 0)
        self._num_trained_tokens = 0
        self._append("offsets", np.zeros(1, np.int64))
        self._append("groups", np.zeros(1, np.int64))

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            for file in self._files.values():
                file.close()

    def __len__(self) -> int:
        return self._sizes["rows"]

    def add(self, ids: NDArray[np.uint32], loss_mask: NDArray[np.uint8], row: int) -> None:
        """Appends one document that is a group of its own."""
        self.add_many(ids, loss_mask, np.array([len(ids)]), np.array([row]), np.array([0]), np.array([1]))

    def add_many(
        self,
        tokens: NDArray[np.uint32],
        loss_mask: NDArray[np.uint8],
        lengths: NDArray[np.integer],
        rows: NDArray[np.integer],
        roles: NDArray[np.integer],
        group_sizes: NDArray[np.integer],
    ) -> None:
        """Appends N documents of `lengths` [N] tokens, in groups of `group_sizes` [G] documents."""
        self._append("offsets", self._sizes["tokens"] + np.cumsum(lengths))
        self._append("groups", self._sizes["rows"] + np.cumsum(group_sizes))
        self._append("tokens", tokens)
        self._append("loss_mask", loss_mask)
        self._num_trained_tokens += int(np.count_nonzero(loss_mask))
        self._append("rows", rows)
        self._append("roles", roles)

    def add_groups(self, store: TokenStore, groups: NDArray[np.integer]) -> None:
        """Appends groups of another store; neighbours are copied together, so many at a time."""
        for first, last in _ranges(groups):
            begin, end = int(store.groups[first]), int(store.groups[last])
            low, high = int(store.offsets[begin]), int(store.offsets[end])
            self.add_many(
                store.load("tokens", low, high),
                store.load("loss_mask", low, high),
                np.diff(store.offsets[begin : end + 1]),
                store.rows[begin:end],
                store.roles[begin:end],
                np.diff(store.groups[first : last + 1]),
            )

    def close(self, **meta: Any) -> None:
        """Completes the store; `meta` goes into `store.json`."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        with (self.folder / "store.json").open("wb") as file:
            about = {"version": STORE_VERSION, "sizes": self._sizes, "num_trained_tokens": self._num_trained_tokens}
            file.write(orjson.dumps({**about, **meta}))
            file.flush()
            os.fsync(file.fileno())

    def _append(self, name: str, values: NDArray[Any]) -> None:
        self._files[name].write(np.ascontiguousarray(values, FILES[name]).tobytes())
        self._sizes[name] += len(values)


def _ranges(numbers: NDArray[np.integer]) -> list[tuple[int, int]]:
    """`[first, last)` of each run of consecutive numbers, long runs in pieces."""
    if not len(numbers):
        return []
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    edges = [0, *cuts.tolist(), len(numbers)]
    runs = ((int(numbers[a]), int(numbers[b - 1]) + 1) for a, b in pairwise(edges))
    return [(at, min(at + GROUPS_AT_ONCE, last)) for first, last in runs for at in range(first, last, GROUPS_AT_ONCE)]
