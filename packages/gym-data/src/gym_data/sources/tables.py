"""Tables: csv and tsv as text, parquet and arrow with their own types."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import chain, islice
from typing import Any

from gym_data.sources.chunk import Chunk, NumberedRow, Rows
from gym_data.sources.decoded import text_reader, undecodable
from gym_data.sources.open_bytes import is_url, open_bytes, open_stored
from gym_sdk.errors import DataError, MissingExtra, Where

ROWS_IN_CHUNK = 1024


DELIMITERS = ",;\t"
_SEPARATOR = re.compile(r"sep=(.)\r?\n?")
"""Excel's own way to name the delimiter, in a line before the header."""


def csv_chunks(uri: str, delimiter: str | None = None, encoding: str = "utf-8") -> Iterator[Chunk]:
    """Rows of a table with a header. Every value is the text that stands in the file: 00501, null, 1.10, NA.

    Without a `delimiter` it is the one of the header: where a comma is the decimal sign, spreadsheets write semicolons.
    """
    with open_bytes(uri) as file:
        rows = _csv_rows(uri, text_reader(file, uri, encoding), delimiter)
        while part := list(islice(rows, ROWS_IN_CHUNK)):
            yield Rows(uri, part)


def _csv_rows(uri: str, text: io.TextIOWrapper, delimiter: str | None) -> Iterator[NumberedRow]:
    csv.field_size_limit(1 << 30)
    offset = before = 0
    try:
        first = text.readline()
        if named := _SEPARATOR.fullmatch(first):
            delimiter, first, offset = named[1], text.readline(), 1
        reader = csv.reader(chain([first], text), delimiter=delimiter or delimiter_of(first), strict=True)
        header = next(reader, [])
        if len(set(header)) != len(header):
            raise DataError("two columns have the same name", where=Where(file=uri, line=offset + 1))
        before = offset + reader.line_num
        for values in reader:
            begin, before = before + 1, offset + reader.line_num
            if not values:
                continue
            if len(values) != len(header):
                raise DataError(
                    f"{len(values)} values for {len(header)} columns ({', '.join(header)})",
                    where=Where(file=uri, line=begin),
                    hint="Values that hold the delimiter or a line break must stand in double quotes.",
                )
            yield begin, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise DataError(f"not a valid table: {error}", where=Where(file=uri, line=before + 1)) from None
    except UnicodeDecodeError as error:
        raise undecodable(uri, error) from None


def delimiter_of(header: str) -> str:
    """The comma, semicolon or tab that parts the header's names, quotes aside; a comma when there is one name."""
    bare = re.sub(r'"[^"]*"', "", header)
    return max(DELIMITERS, key=bare.count)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group of a parquet file, read where it is needed."""

    uri: str
    group: int
    first_row: int

    def rows(self) -> Iterator[NumberedRow]:
        with _parquet(self.uri) as file:
            row = self.first_row
            try:
                for batch in file.iter_batches(ROWS_IN_CHUNK, row_groups=[self.group]):
                    for value in _plain_rows(batch, self.uri, row):
                        yield row, value
                        row += 1
            except _damages() as error:
                raise DataError(f"cannot be read: {error}", where=Where(file=self.uri, line=row)) from None


def parquet_chunks(uri: str) -> Iterator[Chunk]:
    """One chunk a row group."""
    with _parquet(uri) as file:
        first = 1
        for group in range(file.num_row_groups):
            yield RowGroup(uri, group, first)
            first += file.metadata.row_group(group).num_rows


@contextmanager
def _parquet(uri: str) -> Iterator[Any]:
    _pyarrow()
    import pyarrow.parquet as parquet

    with open_stored(uri) as file:
        try:
            opened = parquet.ParquetFile(file)
        except _damages() as error:
            raise DataError(f"not a valid parquet file: {error}", where=Where(file=uri, line=1, column=1)) from None
        yield opened


def arrow_chunks(uri: str) -> Iterator[Chunk]:
    """Record batches of an arrow file, or of a stream as `datasets` saves it."""
    pyarrow = _pyarrow()
    row = 1
    with ExitStack() as stack:
        try:
            # A file of this machine is mapped, so that a batch is all that is in memory.
            source: Any = stack.enter_context(open_stored(uri) if is_url(uri) else pyarrow.memory_map(uri))
            try:
                reader = pyarrow.ipc.open_file(source)
                batches: Any = (reader.get_batch(i) for i in range(reader.num_record_batches))
            except pyarrow.ArrowInvalid:
                source.seek(0)
                batches = pyarrow.ipc.open_stream(source)
            for batch in batches:
                values = _plain_rows(batch, uri, row)
                yield Rows(uri, list(enumerate(values, row)))
                row += len(values)
        except FileNotFoundError:
            raise DataError("the data file does not exist", where=Where(file=uri)) from None
        except _damages() as error:
            raise DataError(f"not a valid arrow file: {error}", where=Where(file=uri, line=row, column=1)) from None


def _plain_rows(batch: Any, uri: str, row: int) -> list[dict[str, Any]]:
    # A damaged file's offsets point anywhere: without this, reading its values would crash the process.
    batch.validate(full=True)
    rows = batch.to_pylist()
    # Arrow gives every struct every field of its column; a key that is null in a nested value was not there.
    nested = [name for name, kind in zip(batch.schema.names, batch.schema.types, strict=True) if _is_nested(kind)]
    for offset, value in enumerate(rows):
        for name in nested:
            value[name] = without_nulls(value[name])
        for name, item in value.items():
            if not _is_json(item):
                raise DataError(
                    f"a value of type {type(item).__name__} is no text, number, list or object",
                    where=Where(file=uri, line=row + offset, path=name),
                )
    return rows


def without_nulls(value: Any) -> Any:
    """A nested value without the null fields that a common schema gave its objects."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _is_nested(kind: Any) -> bool:
    types = _pyarrow().types
    return types.is_struct(kind) or types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind)


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float | bool)


def _damages() -> tuple[type[Exception], ...]:
    """What pyarrow raises for a file that is not what it says: nearly anything."""
    return (OSError, ValueError, TypeError, LookupError, MemoryError, _pyarrow().ArrowException)


def _pyarrow() -> Any:
    try:
        pyarrow = import_module("pyarrow")
        import_module("pyarrow.ipc")
    except ImportError:
        raise MissingExtra("reading parquet and arrow files", package="gym-data", extra="tables") from None
    return pyarrow
