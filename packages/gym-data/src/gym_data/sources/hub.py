"""Data sets of the Hugging Face hub, read through `datasets`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from gym_data.sources.chunk import Chunk, Rows
from gym_data.sources.inputs import Position, numbered_chunks
from gym_data.sources.tables import without_nulls
from gym_sdk.errors import DataError, MissingExtra, Where
from gym_sdk.spec.data import DataSource

ROWS_IN_CHUNK = 1024


@dataclass(frozen=True)
class HubInput:
    """`hub:owner/name`, or `hub:owner/name/subset`, and the source's `split` and `revision`."""

    source: DataSource
    entry_json: str = ""
    """What describes the source beside the specification."""

    @property
    def files(self) -> list[str]:
        """The source itself: the hub's files are the library's business."""
        return [self.source.source]

    @property
    def size_bytes(self) -> int | None:
        """Not known before it is read."""
        return None

    @cached_property
    def _rows(self) -> Any:
        try:
            import datasets
        except ImportError:
            raise MissingExtra("reading data sets of the hub", package="gym-data", extra="hub") from None
        owner, name, *subset = self.source.source.removeprefix("hub:").split("/")
        try:
            return datasets.load_dataset(
                f"{owner}/{name}", *subset, split=self.source.split, revision=self.source.revision
            )
        except Exception as error:  # noqa: BLE001 - the library raises whatever its parts raise
            raise DataError(f"cannot be read: {error}", where=Where(file=self.source.source)) from None

    def digest(self) -> str:
        """Of the data set's fingerprint, which follows from its files and their revision."""
        return hashlib.sha256(f"{self.entry_json}{self.source.source}\0{self._rows._fingerprint}".encode()).hexdigest()

    def quick_digest(self) -> str:
        """The same: it reads no rows."""
        return self.digest()

    def chunks_from(self, position: Position) -> Iterator[tuple[Position, Chunk]]:
        """The chunks from a position on, each with its own."""
        return numbered_chunks(self.chunks(), position)

    def chunks(self) -> Iterator[Chunk]:
        """The rows in chunks, with null fields of nested values taken out again."""
        rows = enumerate(iter(self._rows), 1)
        rows = rows if self.source.limit is None else islice(rows, self.source.limit)
        while part := list(islice(rows, ROWS_IN_CHUNK)):
            yield Rows(
                self.source.source,
                [(number, {key: without_nulls(value) for key, value in row.items()}) for number, row in part],
            )
