"""Naming a file's own columns by a format's keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gym_data.formats._base import Row, RowError

_STEP = re.compile(r"([^.\[\]]+)|\[(-?\d*)\]")


class Columns:
    """Renames columns: `{"prompt": "question", "completion": "instances[].output"}`.

    In a path, `[2]` takes an element of a list and `[]` its only one: a second element is an error. A mapped key
    overrides a column of the same name. Columns that are not mapped are carried along unless the mapping, or the
    format, uses their name. A key that is mapped to its own name is read where a row has it.
    """

    def __init__(self, mapping: Mapping[str, str]) -> None:
        """Keys are the format's, values are column names, or paths into nested columns."""
        self._mapping = dict(mapping)
        self._paths = {key: _parse(path) for key, path in mapping.items()}

    def __bool__(self) -> bool:
        return bool(self._mapping)

    def mapped(self, row: Row) -> Row:
        """The mapped columns alone: what a format is recognised by."""
        return {key: self._value(row, key) for key, path in self._mapping.items() if key != path or key in row}

    def rest(self, row: Row, fields: tuple[str, ...]) -> Row:
        """The columns that are neither mapped nor named like one of the format's fields."""
        used = {path[0] for path in self._paths.values()}
        return {key: value for key, value in row.items() if key not in used and key not in fields}

    def _value(self, row: Row, key: str) -> Any:
        value: Any = row
        path = self._paths[key]
        # A path's whole text may be the name of a column with dots in it.
        if self._mapping[key] in row:
            return row[self._mapping[key]]
        for step in path:
            if step is None or isinstance(step, int):
                if step is None and isinstance(value, list) and len(value) > 1:
                    raise RowError(f"{self._mapping[key]!r} asks for the only element, but there are {len(value)}", key)
                if not isinstance(value, list) or not -len(value) <= (step or 0) < len(value):
                    raise RowError(f"there is no element {step or 0} for {self._mapping[key]!r}", key)
                value = value[step or 0]
            elif isinstance(value, dict) and step in value:
                value = value[step]
            else:
                raise RowError(
                    f"there is no column {self._mapping[key]!r}", key, f"The columns are {', '.join(map(repr, row))}."
                )
        return value


def _parse(path: str) -> list[str | int | None]:
    """Names, indices, and None for the only element."""
    steps: list[str | int | None] = []
    for match in _STEP.finditer(path):
        name, index = match.groups()
        steps.append(name if name is not None else int(index) if index else None)
    return steps or [path]
