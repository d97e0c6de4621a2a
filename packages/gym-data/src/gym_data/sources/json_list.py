"""A JSON file of one list, element by element: a list of any length takes the memory of its longest element."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO, Any

from gym_data._json import RepeatedKey, loads
from gym_data.sources.chunk import NumberedRow, json_error
from gym_sdk.errors import DataError, Where

BLOCK_BYTES = 1 << 20
_NEAR_END = 64
"""A fault so near to the end of what was read may be the end of what was read."""
_SPACE = re.compile(r"[ \t\n\r]*")
_find_end = json.JSONDecoder(parse_float=str, parse_int=str).raw_decode


def list_rows(file: IO[bytes], uri: str) -> Iterator[NumberedRow]:
    """The elements of a list, whose `[` is the first character that is no space, numbered from 1.

    Raises DataError with file, line and column.
    """
    text = _Text(file, uri)
    position = text.after_space(text.after_space(0) + 1)
    number = 0
    if text.at(position) != "]":
        while True:
            stop = text.end_of_element(position)
            # Not before: what is wrong after a comma is said of the text with the element in front of it.
            text.keep_from(position)
            number += 1
            yield number, text.row(position, stop, number)
            position = text.after_space(stop)
            if text.at(position) != ",":
                break
            position = text.after_space(position + 1)
    if text.at(position) != "]" or text.at(text.after_space(position + 1)):
        raise text.fault()


class _Text:
    """A file's text from an element on, read as it is asked for. Positions are characters from the file's start."""

    def __init__(self, file: IO[bytes], uri: str) -> None:
        self._file = file
        self._uri = uri
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._first = self._kept = 0
        """Positions: of the first character in memory, and of the first that is still needed."""
        self._line = self._column = 1
        """Of the first character in memory."""

    def at(self, position: int) -> str:
        """The character there; empty at the end of the file."""
        return self._text[position - self._first : position - self._first + 1]

    def after_space(self, position: int) -> int:
        """The next character from `position` on that is no space, or the end of the file."""
        while True:
            match = _SPACE.match(self._text, position - self._first)
            position = self._first + match.end() if match else position
            if position < self._first + len(self._text) or not self._grow():
                return position

    def keep_from(self, position: int) -> None:
        """Lets go of what stands before."""
        self._kept = position

    def end_of_element(self, position: int) -> int:
        """Where the element that starts there ends."""
        while True:
            try:
                return self._first + _find_end(self._text, position - self._first)[1]
            except RecursionError:
                raise self.fault() from None
            except json.JSONDecodeError as error:
                is_open = error.msg.startswith("Unterminated") or error.pos > len(self._text) - _NEAR_END
                if not is_open or not self._grow():
                    raise self.fault() from None

    def row(self, start: int, stop: int, number: int) -> dict[str, Any]:
        """The element between as an object."""
        element = self._text[start - self._first : stop - self._first].encode()
        try:
            row = loads(element)
        except RepeatedKey as error:
            raise json_error(error, element, self._uri, self._place(start)[0]) from None
        except ValueError:
            raise self.fault() from None
        if not isinstance(row, dict):
            raise DataError("a row must be a JSON object", where=Where(file=self._uri, line=number))
        return row

    def fault(self) -> DataError:
        """What is wrong with the list from what is kept on."""
        line, column = self._place(self._kept)
        # The bracket is not kept; the spaces are there because NULs in the first bytes of a file mean UTF-16.
        bracket = b"    [" if self._kept else b""
        text = bracket + self._text[self._kept - self._first :].encode()
        try:
            loads(text)
        except ValueError as error:
            if getattr(error, "lineno", 2) == 1:
                error.colno += column - 1 - len(bracket)  # type: ignore[attr-defined]
            return json_error(error, text, self._uri, line)
        return DataError("not valid JSON: the list does not end", where=Where(file=self._uri, line=line))

    def _place(self, position: int) -> tuple[int, int]:
        """Line and column."""
        return _moved(self._line, self._column, self._text[: position - self._first])

    def _grow(self) -> bool:
        """Reads on, as much again as there is, so that a long element is not looked at too often."""
        self._line, self._column = self._place(self._kept)
        self._text, self._first = self._text[self._kept - self._first :], self._kept
        data = self._file.read(max(BLOCK_BYTES, len(self._text)))
        try:
            self._text += self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            before = self._text + error.object[: error.start].decode("utf-8", "ignore")
            line, column = _moved(self._line, self._column, before)
            raise DataError(
                f"not UTF-8 text: byte {error.object[error.start]:#04x}, {error.reason}",
                where=Where(file=self._uri, line=line, column=column),
                hint="Save the file as UTF-8.",
            ) from None
        return bool(data)


def _moved(line: int, column: int, text: str) -> tuple[int, int]:
    """The line and column after `text`."""
    lines = text.count("\n")
    return line + lines, len(text) - text.rfind("\n") if lines else column + len(text)
