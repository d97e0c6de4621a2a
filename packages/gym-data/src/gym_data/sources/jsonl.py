"""Rows of JSON Lines, with the line and column of whatever is broken."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import orjson

from gym_sdk.errors import DataError, Where

_BOM = b"\xef\xbb\xbf"
_LONG_NUMBER = re.compile(rb"[0-9]{19}")


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """`(line, row)` of each line that is not blank."""
    for number, line in read_lines(path):
        yield number, parse_row(line, path, number)


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """`(line number, bytes)` of each line that is not blank, of a plain or gzipped file."""
    number = 0
    try:
        with open_bytes(path) as file:
            for number, line in enumerate(file, 1):
                if number == 1 and line.startswith(_BOM):
                    line = line[len(_BOM) :]
                if not line.isspace():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        message = "the file ends in the middle of its compressed data" if isinstance(error, EOFError) else str(error)
        raise DataError(message, where=Where(file=str(path), line=number + 1, column=1)) from None


def open_bytes(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def parse_row(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """One line as an object. Raises DataError with line and column."""
    try:
        # orjson turns whole numbers beyond 64 bits into floats; the standard library keeps them.
        row = json.loads(line) if _LONG_NUMBER.search(line) else orjson.loads(line)
    except ValueError as error:
        column = getattr(error, "colno", 0)
        if isinstance(error, UnicodeDecodeError):
            column = len(line[: error.start].decode("utf-8", "ignore")) + 1
        raise DataError(
            f"not valid JSON: {getattr(error, 'msg', error)}",
            where=Where(file=str(path), line=number, column=max(1, column)),
            hint="Each line must hold one whole JSON object." if column else None,
        ) from None
    if not isinstance(row, dict):
        raise DataError("a row must be a JSON object", where=Where(file=str(path), line=number, column=1))
    return row
