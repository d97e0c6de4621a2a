"""What a row had beyond the canonical record, kept as JSON text so that the row can be written back exactly."""

from __future__ import annotations

from typing import Any

from gym_data._json import dumps, loads


def dump_meta(**parts: Any) -> str | None:
    """The non-empty parts as JSON text; None when there are none."""
    kept = {name: value for name, value in parts.items() if value}
    return dumps(kept) if kept else None


def load_meta(meta_json: str | None) -> dict[str, Any]:
    """The parts that `dump_meta` kept."""
    return loads(meta_json) if meta_json else {}


def dump_optional(value: Any) -> str | None:
    """A JSON value as text; None for a missing or null one."""
    return None if value is None else dumps(value)
