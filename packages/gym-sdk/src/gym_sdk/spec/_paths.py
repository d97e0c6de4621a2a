"""Relative paths of a specification, made absolute from the folder they were written in."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from gym_sdk.spec._base import FilePath
from gym_sdk.spec._fields import Shape, field_shape

SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+:")
"""`package:`, `file:`, `https:`: not a path. Two letters at least, so that a Windows drive is one."""


def absolute_paths(data: Any, shape: Shape, base: Path) -> Any:
    """A copy of plain data in which each text of a path field is absolute; what does not fit the shape is kept."""
    if isinstance(data, str):
        markers = [part for _, constraints in shape.scalars for part in constraints if isinstance(part, FilePath)]
        return absolute_path(data, markers[0], base) if markers else data
    if isinstance(data, list) and shape.items is not None:
        return [absolute_paths(item, shape.items, base) for item in data]
    if isinstance(data, dict) and shape.models:
        # Fields of one name are paths in every kind or in none, so the kind need not be known here.
        infos = {name: info for model in shape.models for name, info in model.model_fields.items()}
        return {
            key: absolute_paths(value, field_shape(infos[key]), base) if key in infos else value
            for key, value in data.items()
        }
    return data


def absolute_path(text: str, marker: FilePath, base: Path) -> str:
    """`text` as an absolute path, or as it is where it names something else."""
    if not text or SCHEME.match(text):
        return text
    try:
        path = Path(text).expanduser()
        written_as_path = text.startswith((".", "~")) or text.endswith(".gguf") or path.is_absolute()
        if marker.or_name and not written_as_path and not (base / path).exists():
            return text
        # Not resolved: a symbolic link that is swapped later still leads to where the user meant.
        return os.path.normpath(base / path)
    except (OSError, RuntimeError, ValueError):
        return text
