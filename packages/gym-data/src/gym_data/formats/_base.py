"""What a format is, and the errors of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from gym_data.record import Record, Source
from gym_sdk.errors import DataError, Where

Row = dict[str, Any]


class Format(Protocol):
    """A shape of rows. `export(to_record(row)) == row` holds for every row that it takes."""

    @property
    def name(self) -> str:
        """As in `format:` of the specification."""
        ...

    @property
    def signature(self) -> str:
        """The keys by which it is recognised, for messages."""
        ...

    @property
    def fields(self) -> tuple[str, ...]:
        """The keys that it reads; the rest of a row is carried along."""
        ...

    def matches(self, row: Row) -> bool:
        """Whether a row has this shape, by its keys and their types."""
        ...

    def to_record(self, row: Row, source: Source) -> Record:
        """The record. Raises RowError."""
        ...

    def export(self, record: Record) -> Row:
        """The row that gives this record."""
        ...


@dataclass(slots=True)
class RowError(Exception):
    """A row that cannot be used; the reader adds file and line."""

    message: str
    path: str | None = None
    hint: str | None = None

    def located(self, source: Source) -> DataError:
        """The error with its place."""
        return DataError(self.message, where=Where(file=source.uri, line=source.row, path=self.path), hint=self.hint)


def text_of(row: Row, key: str, *, default: str | None = None) -> str:
    """The string under `key`. Raises RowError for any other type: a value never changes its type silently."""
    value = row.get(key, default)
    if not isinstance(value, str):
        raise RowError(f"{key} must be text, not {type_name(value)}", key)
    return value


def type_name(value: Any) -> str:
    """JSON's name of a value's type."""
    names = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "nothing" if value is None else names.get(type(value), type(value).__name__)
