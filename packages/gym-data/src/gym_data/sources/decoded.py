"""Text in the encoding that a source names, with errors that say where a byte does not fit."""

from __future__ import annotations

import codecs
import io
from typing import IO

from gym_data.sources.open_bytes import open_bytes
from gym_sdk.errors import DataError, Where

_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def text_reader(file: IO[bytes], uri: str, encoding: str) -> io.TextIOWrapper:
    """The file as text with its line breaks as they are. A byte order mark goes before `encoding`."""
    buffered = file if hasattr(file, "peek") else io.BufferedReader(file)  # type: ignore[arg-type] - it only reads
    start = buffered.peek(4)[:4]  # type: ignore[union-attr]
    marked = next((name for mark, name in _MARKS if start.startswith(mark)), None)
    return io.TextIOWrapper(buffered, marked or _known(encoding, uri), newline="")  # type: ignore[arg-type]


def decoded(data: bytes, uri: str, encoding: str) -> str:
    """All of a file's text. Raises DataError with line and column."""
    marked = next((name for mark, name in _MARKS if data.startswith(mark)), None)
    try:
        return data.decode(marked or _known(encoding, uri))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        column = len(data[: error.start].rsplit(b"\n", 1)[-1].decode(error.encoding, "ignore")) + 1
        raise _error(error, Where(file=uri, line=line, column=column)) from None


def undecodable(uri: str, error: UnicodeDecodeError) -> DataError:
    """The error of a file that is read in pieces, with its place, for which the file is read once more."""
    with open_bytes(uri) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode(error.encoding)
            except UnicodeDecodeError as found:
                column = len(line[: found.start].decode(error.encoding, "ignore")) + 1
                return _error(found, Where(file=uri, line=number, column=column))
    return _error(error, Where(file=uri))  # of an encoding whose line breaks are no single bytes


def _error(error: UnicodeDecodeError, where: Where) -> DataError:
    return DataError(
        f"not {error.encoding.upper()} text: byte 0x{error.object[error.start]:02x}, {error.reason}",
        where=where,
        hint="Save it as UTF-8, or say how it is stored: encoding: cp1252 is usual for older spreadsheets.",
    )


def _known(encoding: str, uri: str) -> str:
    try:
        codecs.lookup(encoding)
    except LookupError:
        raise DataError(
            f"unknown encoding {encoding!r}", where=Where(file=uri), hint="Such as utf-8 or cp1252."
        ) from None
    return encoding
