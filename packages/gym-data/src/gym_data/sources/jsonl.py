"""JSON Lines, and JSON files of one list."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from gym_data._json import loads
from gym_data.sources.chunk import Chunk, JsonLines, NumberedRow, Rows, json_error
from gym_data.sources.json_list import list_rows
from gym_data.sources.open_bytes import open_bytes, skip_bytes
from gym_sdk.errors import DataError, Where

CHUNK_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
LIST_ROWS = 256


def jsonl_chunks(uri: str, size: int = CHUNK_BYTES, *, first_byte: int = 0, first_line: int = 1) -> Iterator[JsonLines]:
    """Chunks of whole lines, of at most `size` bytes unless a line is longer.

    Reading may start at the byte at which an earlier reading began a chunk; the chunks are the same from there on.
    """
    line, place = first_line, first_byte
    with open_bytes(uri) as file:
        skip_bytes(file, first_byte)
        rest = b""
        while data := file.read(size - len(rest) if len(rest) < size else size):
            rest += data
            cut = rest.rfind(b"\n") + 1
            if cut:
                yield JsonLines(uri, line, _without_mark(rest[:cut], place), place)
                line += rest.count(b"\n", 0, cut)
                place += cut
                rest = rest[cut:]
        if rest := _without_mark(rest, place):
            yield JsonLines(uri, line, rest, place)


def _without_mark(data: bytes, place: int) -> bytes:
    """Without the byte order mark, which only the start of a file can have."""
    return data if place else data.removeprefix(BOM)


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
    if start.startswith(b"["):
        with open_bytes(uri) as file:
            yield from _in_parts(uri, list_rows(file, uri))
        return
    with open_bytes(uri) as file:
        text = file.read().removeprefix(BOM)
    try:
        row = loads(text)
    except ValueError as error:
        raise json_error(error, text, uri, 1) from None
    if not isinstance(row, dict):
        raise DataError("a row must be a JSON object", where=Where(file=uri, line=1))
    yield Rows(uri, [(1, row)])


def _in_parts(uri: str, rows: Iterator[NumberedRow]) -> Iterator[Rows]:
    while part := list(islice(rows, LIST_ROWS)):
        yield Rows(uri, part)


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """`(line, row)` of a JSON Lines file. Raises DataError with file, line and column."""
    for chunk in jsonl_chunks(str(path)):
        yield from chunk.rows()
