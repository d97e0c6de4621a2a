"""Tool calls as JSON objects, read while they are written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call. The first of a call has its name; `arguments` are appended, as the model wrote them."""

    index: int
    name: str | None = None
    arguments: str = ""
    id: str | None = None
    """Given by Gym with the name; models don't write any."""


_ARGUMENT_KEYS = ("arguments", "parameters", "args")


class JsonCalls:
    """Reads `{"name": ..., "arguments": {...}}`, or a list of such objects, and gives the arguments out as they come.

    The arguments' text is passed on untouched: no number or escape changes, and broken JSON stays visible. Arguments
    that come before their name wait for it; arguments given as a string are unpacked.
    """

    def __init__(self, first_index: int = 0) -> None:
        self.index: int = first_index
        """Of the next call."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._text = ""
        """The string or scalar that is being read at an object's own level."""
        self._key: str | None = None
        self._expects: Literal["key", "value"] = "key"
        self._name: str | None = None
        self._waiting = ""
        """Arguments of a call whose name has not come yet."""
        self._has_arguments = False
        self._started = False

    def push(self, text: str) -> list[CallPiece]:
        """The pieces that these characters complete."""
        pieces: list[CallPiece] = []
        run = ""  # consecutive argument characters go out as one piece
        for character in text:
            if run and self._depth == 1:  # this character may end the call
                self._arguments(run, pieces)
                run = ""
            run += self._feed(character, pieces)
        if run:
            self._arguments(run, pieces)
        return pieces

    def _feed(self, c: str, pieces: list[CallPiece]) -> str:
        """Take one character; returns it when it belongs to the arguments."""
        in_arguments = self._depth >= 1 and self._expects == "value" and self._key in _ARGUMENT_KEYS
        if self._in_string:
            return self._string(c, in_arguments)
        if c == '"':
            self._in_string = True
            if self._depth == 1:
                self._text = ""
            return c if in_arguments and self._depth > 1 else ""
        if c in "{[":
            if self._depth == 0 and c == "[":
                return ""  # a list of calls
            self._depth += 1
            if self._depth == 1:
                self._begin()
                return ""
            return c if in_arguments else ""
        if c in "}]":
            if self._depth == 0:
                return ""
            self._depth -= 1
            if self._depth == 0:
                self._value_ended(pieces)
                self._end(pieces)
                return ""
            return c if in_arguments else ""
        if self._depth == 1:
            if c == ":":
                self._key, self._expects, self._text = self._text, "value", ""
                return ""
            if c == ",":
                self._value_ended(pieces)
                return ""
            if not c.isspace():
                self._text += c
            return ""
        return c if in_arguments else ""

    def _string(self, c: str, in_arguments: bool) -> str:
        if self._escaped:
            self._escaped = False
        elif c == "\\":
            self._escaped = True
        elif c == '"':
            self._in_string = False
            if self._depth == 1:
                self._text = _unquoted(self._text)
                if in_arguments:  # arguments that are a string hold JSON text
                    text, self._text = self._text, ""
                    return text
                return ""
            return c if in_arguments else ""
        if self._depth == 1:
            self._text += c
            return ""
        return c if in_arguments else ""

    def _begin(self) -> None:
        self._key, self._expects, self._text = None, "key", ""
        self._name, self._waiting, self._started, self._has_arguments = None, "", False, False

    def _value_ended(self, pieces: list[CallPiece]) -> None:
        if self._expects == "value" and self._key == "name" and self._text:
            self._name = self._text
            pieces.append(CallPiece(self.index, self._name, self._waiting))
            self._waiting, self._started = "", True
        self._key, self._expects, self._text = None, "key", ""

    def _arguments(self, text: str, pieces: list[CallPiece]) -> None:
        self._has_arguments = True
        if self._started:
            pieces.append(CallPiece(self.index, None, text))
        else:
            self._waiting += text

    def _end(self, pieces: list[CallPiece]) -> None:
        if self._started:
            if not self._has_arguments:
                pieces.append(CallPiece(self.index, None, "{}"))
            self.index += 1


def _unquoted(text: str) -> str:
    try:
        return json.loads(f'"{text}"', strict=False)
    except ValueError:
        return text
