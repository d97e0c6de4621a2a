"""From a source of the specification to records."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from gym_data.formats import Format, RowError, detect, format_named, formats
from gym_data.record import Record, Source
from gym_data.sources.jsonl import read_jsonl
from gym_sdk.errors import DataError, Where
from gym_sdk.spec.data import DataSource


def read_records(source: DataSource) -> Iterator[Record]:
    """The records of a source. Raises DataError with file, line and column.

    With `format: auto` every row is looked at: when rows of two shapes are met, the rest is read too, and the error
    lists which rows have which shape.
    """
    path = Path(source.source).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"the data file {what}", where=Where(file=str(path)))
    rows = read_jsonl(path)
    if source.limit is not None:
        rows = islice(rows, source.limit)
    fixed = format_named(source.format) if source.format != "auto" else None
    seen: dict[str, list[int]] = {}
    current: Format | None = fixed
    for number, row in rows:
        place = Source(str(path), current.name if current else "auto", number)
        if fixed is None and (current is None or not current.matches(row)):
            found = detect(row)
            if found is None:
                raise DataError(
                    f"the shape of this row is not known; its keys are {', '.join(map(repr, row)) or 'none'}",
                    where=Where(file=str(path), line=number),
                    hint="Known shapes: " + "; ".join(f"{f.name} ({f.signature})" for f in formats().values()) + ".",
                )
            if current is not None:
                _raise_mixed(path, seen, found, number, rows)
            current = found
            place = Source(str(path), found.name, number)
        assert current is not None
        seen.setdefault(current.name, []).append(number)
        try:
            yield current.to_record(row, place)
        except RowError as error:
            raise error.located(place) from None
    if not seen:
        raise DataError("the file has no rows", where=Where(file=str(path)))


def _raise_mixed(
    path: Path, seen: dict[str, list[int]], found: Format, number: int, rest: Iterator[tuple[int, dict[str, object]]]
) -> None:
    seen.setdefault(found.name, []).append(number)
    for line, row in rest:
        other = detect(row)
        seen.setdefault(other.name if other else "unknown", []).append(line)
    listed = "; ".join(f"{name}: {_lines(lines)}" for name, lines in seen.items())
    raise DataError(
        f"rows of different formats: {listed}",
        where=Where(file=str(path), line=number),
        hint="Split the file by format, or name the format of the source.",
    )


def _lines(lines: list[int]) -> str:
    shown = ", ".join(map(str, lines[:5]))
    return (
        f"line {shown}"
        if len(lines) == 1
        else f"lines {shown}{f' and {len(lines) - 5} more' if len(lines) > 5 else ''}"
    )
