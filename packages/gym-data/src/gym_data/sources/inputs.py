"""A source opened: its files, their digest, and their chunks in order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from gym_data.sources.chunk import Chunk, Rows
from gym_data.sources.files import chunks_of, files_of
from gym_data.sources.open_bytes import is_url, open_bytes
from gym_sdk.errors import DataError, Where
from gym_sdk.spec.data import DataSource

HUB = "hub:"


@dataclass(frozen=True)
class Input:
    """Files that hold the rows of a source, one after another."""

    source: DataSource

    @cached_property
    def files(self) -> list[str]:
        """Paths and URLs, in order."""
        return files_of(self.source.source)

    def digest(self) -> str:
        """Of every byte of every file, in order. Raises DataError when one cannot be read."""
        digest = hashlib.sha256()
        for uri in self.files:
            with open_bytes_raw(uri) as file:
                while data := file.read(1 << 20):
                    digest.update(data)
            digest.update(b"\0file\0")
        return digest.hexdigest()

    @property
    def size_bytes(self) -> int | None:
        """Of all files together; None where one is not local."""
        import os

        try:
            return sum(os.path.getsize(uri) for uri in self.files)
        except OSError:
            return None

    def chunks(self) -> Iterator[Chunk]:
        """The chunks of all files, up to the source's limit."""
        every = (chunk for uri in self.files for chunk in chunks_of(uri))
        return every if self.source.limit is None else _limited(every, self.source.limit)


def open_input(source: DataSource) -> Any:
    """The input of a source: files, or a data set of the hub."""
    if source.source.startswith(HUB):
        from gym_data.sources.hub import HubInput

        return HubInput(source)
    return Input(source)


def open_bytes_raw(uri: str) -> Any:
    """The bytes of a file as they are, compressed or not."""
    if is_url(uri):
        return open_bytes(uri)
    try:
        return open(uri, "rb")
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=Where(file=uri)) from None


def _limited(chunks: Iterator[Chunk], limit: int) -> Iterator[Chunk]:
    left = limit
    for chunk in chunks:
        rows = list(islice(chunk.rows(), left))
        left -= len(rows)
        yield Rows(chunk.uri, rows)
        if not left:
            return
