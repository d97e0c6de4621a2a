"""Records as rows of another format, and only if nothing is lost."""

from __future__ import annotations

from typing import Any

from gym_data.formats import RowError, format_named
from gym_data.record import Candidate, Message, Record, Source


def converted(record: Record, name: str) -> dict[str, Any]:
    """The record as a row of the format `name`. Raises RowError when the format cannot say all of it."""
    target = format_named(name)
    bare = record._replace(meta_json=None) if record.source is None or record.source.format != name else record
    place = record.source or Source("", name, 0)
    try:
        row = target.export(bare)
        again = target.to_record(row, place)
    except (RowError, KeyError, IndexError, ValueError, TypeError, AttributeError, StopIteration):
        raise RowError(f"cannot be written as {name}: the format has no place for a row of this kind") from None
    for field in ("kind", "prompt", "candidates", "tools_json"):
        if _plain(getattr(again, field)) != _plain(getattr(bare, field)):
            raise RowError(f"cannot be written as {name}: {field} would be lost or changed")
    return row


def _plain(value: Any) -> Any:
    """Without empty parts, which formats write in different ways."""
    if isinstance(value, Candidate):
        return value._replace(messages=_plain(value.messages))
    if isinstance(value, Message):
        return value._replace(parts=tuple(part for part in value.parts if part.text != ""))
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value
