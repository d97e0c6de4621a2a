"""Text files, each a document."""

from __future__ import annotations

from collections.abc import Iterator

from gym_data.sources.chunk import Chunk, Rows
from gym_data.sources.open_bytes import open_bytes
from gym_sdk.errors import DataError, Where


def text_chunks(uri: str) -> Iterator[Chunk]:
    """The whole file as one row `{"text": ...}`. An empty file has no row."""
    with open_bytes(uri) as file:
        data = file.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        column = len(data[: error.start].rsplit(b"\n", 1)[-1].decode("utf-8", "ignore")) + 1
        raise DataError(f"not UTF-8 text: {error.reason}", where=Where(file=uri, line=line, column=column)) from None
    if text.strip():
        yield Rows(uri, [(1, {"text": text})])
