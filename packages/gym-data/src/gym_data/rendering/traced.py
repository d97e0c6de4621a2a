"""Strings that know where each of their characters came from.

A chat template is a program that copies, cuts and joins strings. `Traced` is a `str` whose methods do the same to a
parallel list of runs `(length, origin)`, so that the rendered chat says, for every character, whether the template's
author wrote it or which message it came from. A plain `str` that meets a traced one counts as `UNKNOWN`: nothing is
ever taken for the template's own text by default.
"""

# pyright: reportPrivateUsage=false
# Functions of this module belong to `Traced`; its attributes are private because templates must not see them.

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

TEMPLATE = 0
"""Written by the template, or one of the tokenizer's own tokens (`bos_token`)."""
UNKNOWN = 1
"""Lost its origin in an operation that cannot be followed: numbers, `%` formatting."""
OUTSIDE = 2
"""The user's, but not a message's: tool schemas, documents, template options."""

ROLE, CONTENT, REASONING, OTHER, CALL = range(5)
"""The fields of a message; its k-th call is field `CALL + k`. A role is one of a closed set, so a template may build
control tokens from it."""

_FIELD_BITS = 20

MARK = 1 << 40
"""Set on characters inside `{% generation %}`."""

Run = tuple[int, int]


def origin(message: int, field: int) -> int:
    """The origin of a field of `messages[message]`."""
    return (message + 1) << _FIELD_BITS | field


def message_of(source: int) -> int | None:
    """The message an origin belongs to, if any."""
    index = (source & ~MARK) >> _FIELD_BITS
    return index - 1 if index else None


def field_of(source: int) -> int:
    """The field of an origin that belongs to a message."""
    return source & ((1 << _FIELD_BITS) - 1)


def is_trusted(source: int) -> bool:
    """Whether characters of this origin may form control tokens: the template's own, and roles."""
    source &= ~MARK
    return source == TEMPLATE or (source > OUTSIDE and field_of(source) == ROLE)


def runs_of(text: str) -> tuple[Run, ...]:
    """The runs of any string; a plain one is unknown."""
    if isinstance(text, Traced):
        return text._runs
    return ((len(text), UNKNOWN),) if text else ()


class Traced(str):
    """A string with the origin of each character. Its value behaves as a plain `str` in every other respect."""

    __slots__ = ("_runs",)
    _runs: tuple[Run, ...]

    def __new__(cls, text: object = "") -> Traced:
        """`Traced(text)`, as Jinja's sandbox calls it after formatting: nothing is known of its characters."""
        plain = str(text)
        return Traced.make(plain, ((len(plain), UNKNOWN),) if plain else ())

    @staticmethod
    def make(text: str, runs: tuple[Run, ...]) -> Traced:
        made = str.__new__(Traced, text)
        made._runs = runs
        return made

    @staticmethod
    def of(text: str, source: int) -> Traced:
        """A string that comes from one place."""
        return Traced.make(text, ((len(text), source),) if text else ())

    def _cut(self, start: int, stop: int) -> Traced:
        """`self[start:stop]` for 0 <= start <= stop <= len."""
        runs = []
        position = 0
        for length, source in self._runs:
            low, high = max(start, position), min(stop, position + length)
            if low < high:
                runs.append((high - low, source))
            position += length
            if position >= stop:
                break
        return Traced.make(str.__getitem__(self, slice(start, stop)), tuple(runs))

    def _mapped(self, text: str) -> str:
        """The runs of `self` on a transformed text: kept when lengths agree or all characters share an origin."""
        if len(text) == len(self):
            return Traced.make(text, self._runs)
        sources = {source for _, source in self._runs}
        return Traced.of(text, sources.pop()) if len(sources) == 1 else text

    def __str__(self) -> str:
        return self

    def __reduce__(self) -> Any:
        return (Traced.make, (str.__str__(self), self._runs))

    def __add__(self, other: str) -> str:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        return concat([self] * operator.index(times))

    def __rmul__(self, times: SupportsIndex) -> str:
        return self * times

    def __getitem__(self, key: Any) -> str:
        size = len(self)
        if isinstance(key, slice):
            start, stop, step = key.indices(size)
            if step == 1:
                return self._cut(start, max(start, stop))
            return concat([self._cut(i, i + 1) for i in range(start, stop, step)])
        index = operator.index(key)
        index = index + size if index < 0 else index
        if not 0 <= index < size:
            raise IndexError("string index out of range")
        return self._cut(index, index + 1)

    def __iter__(self) -> Iterator[str]:
        return (self._cut(i, i + 1) for i in range(len(self)))

    def strip(self, chars: str | None = None, /) -> str:
        start = len(self) - len(str.lstrip(self, chars))
        return self._cut(start, max(start, len(str.rstrip(self, chars))))

    def lstrip(self, chars: str | None = None, /) -> str:
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return self._cut(len(prefix), len(self)) if prefix and self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        return self._cut(0, len(self) - len(suffix)) if suffix and self.endswith(suffix) else self

    def _located(self, parts: Sequence[str]) -> list[str]:
        """Traced forms of `parts`, which occur in `self` in this order without overlap."""
        found = []
        position = 0
        for part in parts:
            position = str.find(self, part, position)
            found.append(self._cut(position, position + len(part)))
            position += len(part)
        return found

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        parts = str.split(self, sep, maxsplit)
        if sep is None:
            return self._located(parts)
        found = []
        position = 0
        for part in parts:
            found.append(self._cut(position, position + len(part)))
            position += len(part) + len(sep)
        return found

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        parts = str.rsplit(self, sep, maxsplit)
        if sep is None:
            return self._located(parts)
        found = []
        position = 0
        for part in parts:
            found.append(self._cut(position, position + len(part)))
            position += len(part) + len(sep)
        return found

    def splitlines(self, keepends: bool = False) -> list[str]:
        found = []
        position = 0
        for part, whole in zip(str.splitlines(self, keepends), str.splitlines(self, True), strict=True):
            found.append(self._cut(position, position + len(part)))
            position += len(whole)
        return found

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._partitioned(str.find(self, sep), sep, (self, self._cut(0, 0), self._cut(0, 0)))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._partitioned(str.rfind(self, sep), sep, (self._cut(0, 0), self._cut(0, 0), self))

    def _partitioned(self, at: int, sep: str, missing: tuple[str, str, str]) -> tuple[str, str, str]:
        if at < 0:
            return missing
        return self._cut(0, at), self._cut(at, at + len(sep)), self._cut(at + len(sep), len(self))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        limit = operator.index(count)
        if not old:
            return self._mapped(str.replace(self, old, new, limit))
        pieces: list[str] = []
        position = 0
        while limit != 0 and (at := str.find(self, old, position)) >= 0:
            pieces += (self._cut(position, at), new)
            position = at + len(old)
            limit -= 1
        return concat((*pieces, self._cut(position, len(self))))

    def join(self, iterable: Iterable[str], /) -> str:
        pieces: list[str] = []
        for item in iterable:
            if not isinstance(item, str):
                raise TypeError(f"expected str instance, {type(item).__name__} found")
            pieces += (self, item) if pieces else (item,)
        return concat(pieces)


def _mapping_method(name: str) -> Callable[..., str]:
    plain = getattr(str, name)

    def method(self: Traced, *args: Any, **kwargs: Any) -> str:
        return self._mapped(plain(self, *args, **kwargs))

    method.__name__ = name
    return method


for _name in ("upper", "lower", "title", "capitalize", "casefold", "swapcase", "translate", "expandtabs", "zfill"):
    setattr(Traced, _name, _mapping_method(_name))


def concat(pieces: Iterable[str]) -> str:
    """`"".join(pieces)` with origins; neighbours of one origin become one run."""
    pieces = tuple(pieces)
    runs: list[Run] = []
    for piece in pieces:
        for length, source in runs_of(piece):
            if runs and runs[-1][1] == source:
                runs[-1] = (runs[-1][0] + length, source)
            else:
                runs.append((length, source))
    return Traced.make("".join(pieces), tuple(runs))


def marked(text: str) -> str:
    """`text` with every character marked as standing inside `{% generation %}`."""
    return Traced.make(text, tuple((length, source | MARK) for length, source in runs_of(text)))


def wrap(value: Any, source: int) -> Any:
    """`value` with every string in it, keys too, traced to `source`."""
    if isinstance(value, str):
        return Traced.of(value, source)
    if isinstance(value, dict):
        return {wrap(key, source): wrap(item, source) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [wrap(item, source) for item in value]
    return value


def sources_in(value: Any) -> set[int]:
    """The origins of all strings in a JSON value."""
    if isinstance(value, str):
        return {source for _, source in runs_of(value)}
    if isinstance(value, dict):
        items: Iterable[Any] = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple):
        items = value
    else:
        return set()
    return set().union(*map(sources_in, items)) if items else set()
