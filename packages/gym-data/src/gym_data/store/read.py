"""Memory-mapped tokens, loss masks and document boundaries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from gym_sdk.errors import DataError, Where

STORE_VERSION = 1
FILES: dict[str, Any] = {"tokens": np.uint32, "loss_mask": np.uint8, "offsets": np.int64, "rows": np.int64}


@dataclass(frozen=True, slots=True)
class Document:
    """One row: `ids` [T] uint32, `loss_mask` [T] uint8, and the line or row it came from."""

    ids: NDArray[np.uint32]
    loss_mask: NDArray[np.uint8]
    row: int


class TokenStore:
    """Documents side by side: `tokens` uint32 [T], `loss_mask` uint8 [T], `offsets` int64 [N+1]."""

    def __init__(self, folder: str | Path) -> None:
        """Opens a store; its arrays stay on disk. Raises DataError when it is incomplete."""
        self.folder = Path(folder)
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

    def _map(self, name: str, dtype: Any) -> NDArray[Any]:
        path = self.folder / f"{name}.bin"
        size = self.meta["sizes"][name]
        if path.stat().st_size != size * np.dtype(dtype).itemsize:
            raise ValueError(f"{name}.bin has {path.stat().st_size} bytes")
        return np.memmap(path, dtype, "r", shape=(size,)) if size else np.zeros(0, dtype)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Document:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        start, stop = int(self.offsets[index]), int(self.offsets[index + 1])
        return Document(self.tokens[start:stop], self.loss_mask[start:stop], int(self.rows[index]))

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[N] tokens of each document."""
        return np.diff(self.offsets)

    @property
    def num_tokens(self) -> int:
        """All tokens."""
        return len(self.tokens)

    @cached_property
    def num_trained_tokens(self) -> int:
        """Tokens that are training targets."""
        return int(np.count_nonzero(self.loss_mask))
