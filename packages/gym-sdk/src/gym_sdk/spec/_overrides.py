"""`a.b[0].c=value` overrides from a command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

from gym_sdk.errors import SpecError, Where
from gym_sdk.spec._document import Path, format_path, parse_scalar, parse_yaml
from gym_sdk.spec._fields import Shape, field_shape
from gym_sdk.spec._paths import absolute_paths

COMMAND_LINE = "command line"
_PART = re.compile(r"(?:^|\.)([A-Za-z_][A-Za-z0-9_]*)|\[(\d+)\]")


def apply(data: dict[str, Any], overrides: Sequence[str], shape: Shape) -> tuple[dict[str, Any], set[Path]]:
    """A copy of `data` with the overrides, and the paths they set. Raises SpecError.

    A value is read as YAML would read it, except that a field which takes only text gets the text as it stands
    (`model.revision=007`). A relative path is taken from the current folder, as a shell completes it.
    """
    result, touched, problems = data, set(), []
    for override in overrides:
        try:
            path, text = _split(override)
            field = _shape_at(shape, path) or Shape()
            value = absolute_paths(override_value(text, field), field, FilePath.cwd())
            result = _replaced(result, path, value, ())
            touched.add(path)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError.of(tuple(problems), name=COMMAND_LINE)
    return result, touched


def _split(override: str) -> tuple[Path, str]:
    key, equals, text = override.partition("=")
    if not equals:
        raise SpecError(
            f"{override!r} is not an override",
            where=Where(file=COMMAND_LINE),
            hint="overrides look like train.learning_rate=1e-4 or data.train[0].source=rows.jsonl",
        )
    path, index = [], 0
    while index < len(key) and (match := _PART.match(key, index)):
        path.append(match[1] if match[1] is not None else int(match[2]))
        index = match.end()
    if not path or index != len(key) or isinstance(path[0], int):
        raise SpecError(
            f"{key!r} is not a field's path",
            where=Where(file=COMMAND_LINE),
            hint=_plain_hint(key, text) or "paths look like train.learning_rate or data.train[0].source",
        )
    return tuple(path), text


def _plain_hint(key: str, text: str) -> str | None:
    """The override without the dashes or spaces around it, where that makes it one."""
    plain = key.strip().removeprefix("--")
    return f"write {plain}={text.strip()}" if plain != key and _PART.match(plain) else None


def _shape_at(shape: Shape, path: Path) -> Shape | None:
    """The shape of the field at the path; None where there is none, which validation reports."""
    for depth, part in enumerate(path):
        if isinstance(part, int):
            if shape.items is None:
                where = Where(file=COMMAND_LINE, path=format_path(path[: depth + 1]))
                raise SpecError(f"{format_path(path[:depth])} is not a list", where=where)
            shape = shape.items
            continue
        infos = [model.model_fields[part] for model in shape.models if part in model.model_fields]
        if not infos:
            return None
        shape = field_shape(infos[0])
    return shape


def override_value(text: str, shape: Shape) -> Any:
    """The value that a text on the command line means for a field of this shape."""
    if [kind for kind, _ in shape.scalars] == [str] and not shape.items and not shape.choices:
        return None if shape.nullable and text in ("", "null", "~") else text
    if text.startswith(("{", "[", '"', "'")):
        return parse_yaml(text, COMMAND_LINE).data
    return parse_scalar(text.strip())


def _replaced(data: Any, path: Path, value: Any, done: Path) -> Any:
    if not path:
        return value
    part, rest = path[0], path[1:]
    here = (*done, part)
    if isinstance(part, int):
        items = list(data) if isinstance(data, list) else []
        if part > len(items):
            number = f"{len(items)} item{'s' if len(items) != 1 else ''}"
            where = Where(file=COMMAND_LINE, path=format_path(here))
            raise SpecError(f"{format_path(done)} has {number}", where=where, hint=f"[{len(items)}] appends one")
        if part == len(items):
            items.append(None)
        items[part] = _replaced(items[part], rest, value, here)
        return items
    # A scalar in the way is replaced by a mapping; validation says what the field takes.
    mapping = dict(data) if isinstance(data, dict) else {}
    mapping[part] = _replaced(mapping.get(part), rest, value, here)
    return mapping
