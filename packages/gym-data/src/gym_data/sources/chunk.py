"""A piece of a source that can be handed to another process and parsed there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from gym_data._json import RepeatedKey, loads
from gym_data.sources.open_bytes import suffix_of
from gym_sdk.errors import DataError, Where

NumberedRow = tuple[int, dict[str, Any]]
"""A row and its number in its file, from 1: the line number where the file has lines."""

ONE_OBJECT_A_LINE = (
    "A .jsonl file has one JSON object a line, with nothing between the lines. One list of rows, or rows over several "
    "lines, are a .json file: give it that name."
)


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
        raise DataError(
            "a row must be a JSON object",
            where=Where(file=uri, line=number, column=1),
            hint=ONE_OBJECT_A_LINE if isinstance(row, list) else None,
        )
    return row


def json_error(error: ValueError, text: bytes, uri: str, line: int) -> DataError:
    """The error of JSON text that starts at `line`."""
    if fault := not_utf8(text):
        start, message = fault
        line += text.count(b"\n", 0, start)
        column = len(text[:start].rsplit(b"\n", 1)[-1].decode("utf-8", "ignore")) + 1
        return DataError(message, where=Where(file=uri, line=line, column=column), hint="Save the file as UTF-8.")
    if isinstance(error, RepeatedKey):
        where = Where(file=uri, line=line)
        return DataError(str(error), where=where, hint="Which of its values is meant? Keep that one.")
    column = max(1, getattr(error, "colno", 1))
    line += getattr(error, "lineno", 1) - 1
    message = getattr(error, "msg", None) or str(error).split(": line ", 1)[0]
    return DataError(
        f"not valid JSON: {message}",
        where=Where(file=uri, line=line, column=column),
        hint=_slip(text, getattr(error, "pos", 0), uri),
    )


def not_utf8(text: bytes) -> tuple[int, str] | None:
    """The first byte, from 0, that UTF-8 text does not have, and what that means; None where all of it is UTF-8."""
    if text.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in text[:4]:
        return 0, "this is UTF-16 text, or no text at all, and JSON is UTF-8"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start, f"not UTF-8 text: byte {text[error.start]:#04x}, {error.reason}"
    return None


def _slip(text: bytes, position: int, uri: str) -> str | None:
    """The likely slip of the pen behind JSON that is not valid."""
    # The parser's position counts characters.
    rest = text.decode()[position:].lstrip()
    if re.match(r"-?(?:NaN|Infinity)\b", rest):
        return "JSON has no NaN and no infinity: write null, or leave the row out."
    if re.match(r"(?:None|True|False)\b|'", rest):
        return "This is Python's way to write it, not JSON's: write rows with json.dumps."
    if suffix_is_lines(uri) and (text.strip() in (b"{", b"[") or rest.startswith(",")):
        return ONE_OBJECT_A_LINE
    if not rest:
        return "It ends in the middle: the file was cut, or one row stands on several lines."
    return None


def suffix_is_lines(uri: str) -> bool:
    """Whether a file says by its name that it is JSON Lines."""
    return suffix_of(uri) in (".jsonl", ".ndjson")


def _lines(data: bytes) -> list[bytes]:
    # A carriage return alone does not end a line of JSON Lines.
    return data.split(b"\n")
