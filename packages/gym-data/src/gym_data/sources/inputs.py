"""A source opened: its files, their digest, and their chunks in order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from gym_data.sources.chunk import Chunk, Rows
from gym_data.sources.dataset_info import described
from gym_data.sources.files import chunks_of, files_of
from gym_data.sources.jsonl import jsonl_chunks
from gym_data.sources.open_bytes import open_stored, suffix_of
from gym_sdk.spec.data import DataSource

HUB = "hub:"
LINES = (".jsonl", ".ndjson")
SAMPLE_BYTES = 1 << 16
NUM_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class Position:
    """Where a chunk starts. JSON Lines are found again by their byte, other files by counting chunks."""

    file: int = 0
    chunk: int = 0
    byte: int = 0
    line: int = 1


def numbered_chunks(chunks: Iterator[Chunk], position: Position) -> Iterator[tuple[Position, Chunk]]:
    """Chunks by their number alone; those before the position are read and left out."""
    for number, chunk in enumerate(chunks):
        if number >= position.chunk:
            yield Position(chunk=number), chunk


@dataclass(frozen=True)
class Input:
    """Files that hold the rows of a source, one after another."""

    source: DataSource
    entry_json: str = ""
    """What describes the source beside the specification."""

    @cached_property
    def files(self) -> list[str]:
        """Paths and URLs, in order."""
        return files_of(self.source.source, self.source.split)

    def digest(self) -> str:
        """Of every byte of every file, in order. Raises DataError when one cannot be read."""
        digest = hashlib.sha256(self.entry_json.encode())
        for uri in self.files:
            with open_stored(uri) as file:
                while data := file.read(1 << 20):
                    digest.update(data)
            digest.update(b"\0file\0")
        return digest.hexdigest()

    @property
    def size_bytes(self) -> int | None:
        """Of all files together; None where one is not local."""
        try:
            return sum(os.path.getsize(uri) for uri in self.files)
        except OSError:
            return None

    def quick_digest(self) -> str:
        """Of every file's size and of samples of its bytes: for sources that are too large to be read twice."""
        digest = hashlib.sha256(self.entry_json.encode())
        for uri in self.files:
            with open_stored(uri) as file:
                size = file.seek(0, os.SEEK_END)
                digest.update(size.to_bytes(8, "little"))
                for start in range(0, size, max(SAMPLE_BYTES, size // NUM_SAMPLES)):
                    file.seek(start)
                    digest.update(file.read(SAMPLE_BYTES))
        return digest.hexdigest()

    def chunks(self) -> Iterator[Chunk]:
        """The chunks of all files, up to the source's limit."""
        every = (chunk for uri in self.files for chunk in chunks_of(uri, self.source.encoding))
        return every if self.source.limit is None else _limited(every, self.source.limit)

    def chunks_from(self, position: Position) -> Iterator[tuple[Position, Chunk]]:
        """The chunks from a position on, each with its own, at which a later reading can start again."""
        if self.source.limit is not None:
            yield from numbered_chunks(self.chunks(), position)
            return
        for number, uri in enumerate(self.files):
            if number < position.file:
                continue
            start = position if number == position.file else Position()
            if suffix_of(uri) in LINES:
                for chunk in jsonl_chunks(uri, first_byte=start.byte, first_line=start.line):
                    yield Position(number, 0, chunk.first_byte, chunk.first_line), chunk
            else:
                for place, chunk in numbered_chunks(chunks_of(uri, self.source.encoding), start):
                    yield replace(place, file=number), chunk


def open_input(source: DataSource) -> Any:
    """The input of a source: files, or a data set of the hub."""
    found = described(source)
    if found.source.source.startswith(HUB):
        from gym_data.sources.hub import HubInput

        return HubInput(found.source, found.entry_json)
    return Input(found.source, found.entry_json)


def check_exists(source: DataSource) -> None:
    """Raises DataError, with the nearest name, when there is no such file; reads none. Uploads are not known here."""
    if not source.source.startswith("file:"):
        _ = open_input(source).files


def _limited(chunks: Iterator[Chunk], limit: int) -> Iterator[Chunk]:
    left = limit
    for chunk in chunks:
        rows = list(islice(chunk.rows(), left))
        left -= len(rows)
        yield Rows(chunk.uri, rows)
        if not left:
            return
