"""Writing a token store, document by document, in bounded memory."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from gym_data.store.read import FILES, STORE_VERSION


class StoreWriter:
    """Writes into a folder of its own; the store can be opened once `close` has written `store.json`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._files = {name: (folder / f"{name}.bin").open("wb") for name in FILES}
        self._sizes = dict.fromkeys(FILES, 0)
        self._append("offsets", np.zeros(1, np.int64))

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
        """Appends one document."""
        self._append("tokens", ids)
        self._append("loss_mask", loss_mask)
        self._append("offsets", np.array([self._sizes["tokens"]], np.int64))
        self._append("rows", np.array([row], np.int64))

    def close(self, **meta: Any) -> None:
        """Completes the store; `meta` goes into `store.json`."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        with (self.folder / "store.json").open("wb") as file:
            file.write(orjson.dumps({"version": STORE_VERSION, "sizes": self._sizes, **meta}))
            file.flush()
            os.fsync(file.fileno())

    def _append(self, name: str, values: NDArray[Any]) -> None:
        self._files[name].write(np.ascontiguousarray(values, FILES[name]).tobytes())
        self._sizes[name] += len(values)
