"""JSON Lines, and JSON files of one list."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from gym_data._json import loads
from gym_data.sources.chunk import Chunk, JsonLines, Rows, json_error
from gym_data.sources.open_bytes import open_bytes
from gym_sdk.errors import DataError, Where

CHUNK_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
LIST_ROWS = 1024


def jsonl_chunks(uri: str, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Chunks of whole lines, of about `size` bytes."""
    line = 1
    with open_bytes(uri) as file:
        rest = b""
        is_first = True
        while True:
            data = file.read(size)
            if is_first:
                data, is_first = data.removeprefix(BOM), False
            if not data:
                break
            cut = data.rfind(b"\n") + 1
            if not cut:
                rest += data
                continue
            whole = rest + data[:cut]
            rest = data[cut:]
            yield JsonLines(uri, line, whole)
            line += whole.count(b"\n")
        if rest:
            yield JsonLines(uri, line, rest)


def json_chunks(uri: str) -> Iterator[Chunk]:
    """A JSON file: a list of rows, one row, or, as many are, JSON Lines under another name."""
    with open_bytes(uri) as file:
        start = file.read(CHUNK_BYTES).removeprefix(BOM).lstrip()
    if start.startswith(b"{"):
        first = start.split(b"\n", 1)[0]
        try:
            loads(first)
        except ValueError:
            pass
        else:
            yield from jsonl_chunks(uri)
            return
    with open_bytes(uri) as file:
        text = file.read().removeprefix(BOM)
    try:
        value = loads(text)
    except ValueError as error:
        raise json_error(error, text, uri, 1) from None
    listed = value if isinstance(value, list) else [value]
    rows = []
    for number, row in enumerate(listed, 1):
        if not isinstance(row, dict):
            raise DataError("a row must be a JSON object", where=Where(file=uri, line=number))
        rows.append((number, row))
    numbered = iter(rows)
    while part := list(islice(numbered, LIST_ROWS)):
        yield Rows(uri, part)


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """`(line, row)` of a JSON Lines file. Raises DataError with file, line and column."""
    for chunk in jsonl_chunks(str(path)):
        yield from chunk.rows()
