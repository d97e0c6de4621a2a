"""Text files, each a document."""

from __future__ import annotations

from collections.abc import Iterator

from gym_data.sources.chunk import Chunk, Rows
from gym_data.sources.decoded import decoded
from gym_data.sources.open_bytes import open_bytes


def text_chunks(uri: str, encoding: str = "utf-8") -> Iterator[Chunk]:
    """The whole file as one row `{"text": ...}`. An empty file has no row."""
    with open_bytes(uri) as file:
        text = decoded(file.read(), uri, encoding)
    if text.strip():
        yield Rows(uri, [(1, {"text": text})])
