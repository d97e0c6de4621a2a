"""A piece of a source that can be handed to another process and parsed there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from gym_data._json import loads
from gym_sdk.errors import DataError, Where

NumberedRow = tuple[int, dict[str, Any]]
"""A row and its number in its file, from 1: the line number where the file has lines."""


class Chunk(Protocol):
    """Consecutive rows of one file."""

    @property
    def uri(self) -> str:
        """The file."""
        ...

    def rows(self) -> Iterator[NumberedRow]:
        """The rows. Raises DataError with file, line and column."""
        ...


@dataclass(frozen=True, slots=True)
class JsonLines:
    """Whole lines of JSON Lines, undecoded."""

    uri: str
    first_line: int
    data: bytes
    first_byte: int = 0
    """Where it starts in the file, decompressed."""

    def rows(self) -> Iterator[NumberedRow]:
        for number, line in enumerate(self.data.splitlines() if b"\r" not in self.data else _lines(self.data)):
            if line and not line.isspace():
                yield self.first_line + number, parse_row(line, self.uri, self.first_line + number)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that are parsed already."""

    uri: str
    numbered: list[NumberedRow]

    def rows(self) -> Iterator[NumberedRow]:
        yield from self.numbered


def parse_row(line: bytes, uri: str, number: int) -> dict[str, Any]:
    """One line as an object. Raises DataError with line and column."""
    try:
        row = loads(line)
    except ValueError as error:
        raise json_error(error, line, uri, number) from None
    if not isinstance(row, dict):
        raise DataError("a row must be a JSON object", where=Where(file=uri, line=number, column=1))
    return row


def json_error(error: ValueError, text: bytes, uri: str, line: int) -> DataError:
    """The error of JSON text that starts at `line`."""
    column = getattr(error, "colno", 1)
    line += getattr(error, "lineno", 1) - 1
    if isinstance(error, UnicodeDecodeError):
        column = len(text[: error.start].rsplit(b"\n", 1)[-1].decode("utf-8", "ignore")) + 1
    message = getattr(error, "msg", None) or str(error).split(": line ", 1)[0]
    return DataError(f"not valid JSON: {message}", where=Where(file=uri, line=line, column=max(1, column)))


def _lines(data: bytes) -> list[bytes]:
    # A carriage return alone does not end a line of JSON Lines.
    return data.split(b"\n")
