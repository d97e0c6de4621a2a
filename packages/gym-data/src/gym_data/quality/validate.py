"""Every problem of a source's rows, not only the first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gym_data.record import Record
from gym_data.sources.chunk import Chunk, JsonLines, Rows, parse_row
from gym_data.sources.inputs import open_input
from gym_data.sources.records import RecordReader
from gym_sdk.errors import DataError
from gym_sdk.spec.data import DataSource


@dataclass(frozen=True, slots=True)
class Problem:
    """A row that cannot be used."""

    error: DataError


def checked(source: DataSource) -> Iterator[Record | Problem]:
    """The records of a source, and the problems of the rows that give none.

    Rows of another format than most are no problem of one row, but of the file: that is raised at the end.
    """
    reader = RecordReader(source)
    for chunk in open_input(source).chunks():
        for piece in _pieces(chunk):
            if isinstance(piece, Problem):
                yield piece
                continue
            try:
                yield from reader.records(piece)
            except DataError as error:
                yield Problem(error)
            if reader.is_mixed:
                reader.raise_mixed()
    reader.check_not_empty()


def _pieces(chunk: Chunk) -> Iterator[Chunk | Problem]:
    """A chunk as chunks of one row, so that a broken row hides no other."""
    if isinstance(chunk, JsonLines):
        for number, line in enumerate(chunk.data.split(b"\n"), chunk.first_line):
            if not line or line.isspace():
                continue
            try:
                yield Rows(chunk.uri, [(number, parse_row(line, chunk.uri, number))])
            except DataError as error:
                yield Problem(error)
        return
    try:
        for numbered in chunk.rows():
            yield Rows(chunk.uri, [numbered])
    except DataError as error:
        yield Problem(error)
