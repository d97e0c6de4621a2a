"""Tables of plain text, and values for scripts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from typing import Any, TypeVar, cast

from gym_sdk.cli import console

T = TypeVar("T")


def out_table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Rows in columns on standard output; where there are none, a line on standard error that says so."""
    texts = [[str(cell) for cell in row] for row in rows]
    if not texts:
        console.err(empty)
        return
    widths = [max(len(row[column]) for row in [list(headers), *texts]) for column in range(len(headers))]
    for row in [list(headers), *texts]:
        console.out("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def out_list(items: Sequence[T], columns: Mapping[str, Callable[[T], object]], *, as_json: bool, empty: str) -> None:
    """Snapshots as a table of these columns (heading, and what of an item stands there), or as JSON."""
    if as_json:
        console.out_json(plain(items))
        return
    out_table(list(columns), ([cell(item) for cell in columns.values()] for item in items), empty=empty)


def out_fields(fields: Mapping[str, object]) -> None:
    """Names and values, one a line; what is empty is left out."""
    shown = {name: value for name, value in fields.items() if value not in (None, "", (), {}, [])}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        console.out(f"{name:<{width}}  {value}")


def plain(value: Any) -> Any:
    """A snapshot as plain data for JSON: times in ISO 8601, numbers that JSON cannot hold as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]
        return {name: plain(getattr(value, name)) for name in fields}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in cast("Sequence[object]", value)]
    return value


def age(time: datetime | None) -> str:
    """How long ago: `5 min`, `3 days`."""
    if time is None:
        return ""
    seconds = max(0.0, (datetime.now(UTC) - time).total_seconds())
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size or (size < 86_400 and seconds >= size):
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def local_time(time: datetime | None) -> str:
    """A moment in the zone of this machine."""
    return time.astimezone().strftime("%Y-%m-%d %H:%M:%S") if time else ""
