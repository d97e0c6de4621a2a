"""From rows to records: one format a source, recognised over all its rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from gym_data.formats import Format, RowError, detect, format_named, formats, raise_near_miss
from gym_data.record import Record, Source
from gym_data.sources.chunk import Chunk, NumberedRow
from gym_data.sources.columns import Columns
from gym_data.sources.dataset_info import described
from gym_data.sources.inputs import open_input
from gym_sdk.errors import DataError, Where
from gym_sdk.spec.data import DataSource


def read_records(source: DataSource) -> Iterator[Record]:
    """The records of a source. Raises DataError with file, line and column.

    With `format: auto` every row is looked at: when rows of two shapes are met, the rest is read too, and the error
    lists which rows have which shape.
    """
    reader = RecordReader(source)
    chunks = open_input(source).chunks()
    for chunk in chunks:
        for record in reader.records(chunk):
            if reader.is_mixed:
                break
            yield record
        if reader.is_mixed:
            for rest in chunks:
                reader.scan(rest)
            reader.raise_mixed()
    reader.check_not_empty()


MAX_LINES = 5
"""Rows of each format that a message lists."""


@dataclass
class Seen:
    """How often something was met, and where first."""

    count: int = 0
    lines: list[str] = field(default_factory=list)

    def add(self, line: str, limit: int) -> None:
        """Counts one, and lists it unless `limit` are listed."""
        self.count += 1
        if len(self.lines) < limit:
            self.lines.append(line)

    def merge(self, other: Seen, limit: int = MAX_LINES) -> None:
        """Adds what another chunk met."""
        self.count += other.count
        self.lines += other.lines[: max(0, limit - len(self.lines))]


class RecordReader:
    """Turns the chunks of a source into records, and remembers which formats it met."""

    def __init__(self, source: DataSource, expected: str | None = None) -> None:
        """`expected` is the format that an earlier chunk of the source had."""
        found = described(source)
        self._source = source = found.source
        self._tags = found.tags
        self._columns = Columns(source.columns)
        self._is_fixed = source.format != "auto"
        name = source.format if self._is_fixed else expected
        self._current: Format | None = format_named(name) if name else None
        self.seen: dict[str, Seen] = {}

    @property
    def is_mixed(self) -> bool:
        """Whether rows of different formats were met."""
        return len(self.seen) > 1

    def records(self, chunk: Chunk) -> Iterator[Record]:
        """The records of a chunk. Stops at the first row of another format (`is_mixed`), after counting the rest."""
        rows = self._rows(chunk)
        for number, row in rows:
            found = self._format_of(chunk.uri, number, row)
            self._saw(found.name, chunk.uri, number)
            if self.is_mixed:
                for later, other in rows:
                    self._count(chunk.uri, later, other)
                return
            self._current = found
            yield self._record(found, row, Source(chunk.uri, found.name, number))

    def merge(self, name: str, seen: Seen) -> None:
        """Adds what the reader of another chunk of the source met."""
        self.seen.setdefault(name, Seen()).merge(seen)

    def scan(self, chunk: Chunk) -> None:
        """Only counts the formats of a chunk."""
        for number, row in self._rows(chunk):
            self._count(chunk.uri, number, row)

    def raise_mixed(self) -> NoReturn:
        """The error that lists the rows of each format."""
        listed = "; ".join(f"{name}: {_described(seen)}" for name, seen in self.seen.items())
        raise DataError(
            f"rows of different formats: {listed}",
            where=Where(file=self._source.source),
            hint="Split the file by format, or name the format of the source.",
        )

    def check_not_empty(self) -> None:
        """Raises DataError when no row was met."""
        if not self.seen:
            raise DataError("there are no rows", where=Where(file=self._source.source, line=1, column=1))

    def _rows(self, chunk: Chunk) -> Iterator[NumberedRow]:
        tags = self._tags
        return chunk.rows() if tags is None else ((number, tags.retagged(row)) for number, row in chunk.rows())

    def _count(self, uri: str, number: int, row: dict[str, Any]) -> None:
        found = detect(self._columns.mapped(row) if self._columns else row)
        self._saw(found.name if found else "unknown", uri, number)

    def _saw(self, name: str, uri: str, number: int) -> None:
        seen = self.seen.get(name)
        if seen is None:
            seen = self.seen[name] = Seen()
        seen.count += 1
        if len(seen.lines) < MAX_LINES:
            seen.lines.append(self._label(uri, number))

    def _label(self, uri: str, number: int) -> str:
        """A row's number, with its file where the source has several."""
        return f"{number}" if uri == self._source.source else f"{os.path.basename(uri)}:{number}"

    def _format_of(self, uri: str, number: int, row: dict[str, Any]) -> Format:
        if self._is_fixed and self._current is not None:
            return self._current
        try:
            shape = self._columns.mapped(row) if self._columns else row
        except RowError as error:
            raise error.located(Source(uri, "auto", number)) from None
        if self._current is not None and self._current.matches(shape):
            # A row may match a later format too, but then it matched the same two from the start.
            return self._current
        found = detect(shape)
        if found is None:
            raise_near_miss(shape, Source(uri, "auto", number))
            names = ", ".join(map(repr, row)) or "none"
            raise DataError(
                f"the shape of this row is not known; its columns are {names}",
                where=Where(file=uri, line=number),
                hint="Map the columns, as in data.train[0].columns: {prompt: question, completion: answer}. Known "
                + "shapes: "
                + "; ".join(f"{shape.name} ({shape.signature})" for shape in formats().values()),
            )
        return found

    def _record(self, found: Format, row: dict[str, Any], place: Source) -> Record:
        try:
            if not self._columns:
                return found.to_record(row, place)
            return found.to_record({**self._columns.rest(row, found.fields), **self._columns.mapped(row)}, place)
        except RowError as error:
            raise error.located(place) from None


def _described(seen: Seen) -> str:
    more = f" and {seen.count - len(seen.lines)} more" if seen.count > len(seen.lines) else ""
    return f"row{'s' if seen.count > 1 else ''} {', '.join(seen.lines)}{more}"
