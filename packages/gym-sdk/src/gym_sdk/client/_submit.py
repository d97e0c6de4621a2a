"""Preparing a specification for a daemon: which local files it names, and the specification without them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gym_sdk.errors import UserError, Where
from gym_sdk.spec import RunSpec, load_spec, spec_from_data
from gym_sdk.spec._base import FilePath
from gym_sdk.spec._fields import Shape, field_shape
from gym_sdk.spec._paths import SCHEME

SpecInput = RunSpec | Mapping[str, Any] | str | os.PathLike[str]


def read_spec(spec: SpecInput, overrides: Sequence[str] = ()) -> RunSpec:
    """A specification from a file's path, plain data, or itself. Raises SpecError."""
    if isinstance(spec, RunSpec):
        return spec_from_data(spec.model_dump(mode="json"), overrides=overrides) if overrides else spec
    if isinstance(spec, Mapping):
        return spec_from_data(spec, overrides=overrides)
    return load_spec(spec, overrides)


def local_files(spec: RunSpec) -> list[str]:
    """The files on this machine that the specification reads, each once. Raises UserError for what cannot be sent."""
    found: dict[str, None] = {}
    _visit(spec.model_dump(mode="json"), Shape(models=(RunSpec,)), "", found)
    return list(found)


def with_uploads(spec: RunSpec, uploads: Mapping[str, str]) -> RunSpec:
    """The specification with each file's path replaced by `file:ID`."""
    return spec_from_data(_replace_paths(spec.model_dump(mode="json"), Shape(models=(RunSpec,)), uploads))


def _replace_paths(data: Any, shape: Shape, uploads: Mapping[str, str]) -> Any:
    if isinstance(data, dict) and shape.models:
        infos = {name: info for model in shape.models for name, info in model.model_fields.items()}
        return {key: _replace_paths(value, field_shape(infos[key]), uploads) for key, value in data.items()}
    if isinstance(data, list) and shape.items is not None:
        return [_replace_paths(item, shape.items, uploads) for item in data]
    if isinstance(data, str) and data in uploads and _marker(shape) is not None:
        # Only where paths stand: a name that happens to equal a path is not one.
        return f"file:{uploads[data]}"
    return data


def _visit(data: Any, shape: Shape, path: str, found: dict[str, None]) -> None:
    if isinstance(data, dict) and shape.models:
        infos = {name: info for model in shape.models for name, info in model.model_fields.items()}
        for key, value in data.items():
            _visit(value, field_shape(infos[key]), f"{path}.{key}" if path else key, found)
    elif isinstance(data, list) and shape.items is not None:
        for index, item in enumerate(data):
            _visit(item, shape.items, f"{path}[{index}]", found)
    elif isinstance(data, str) and (marker := _marker(shape)) is not None and not SCHEME.match(data):
        _check(data, marker, path, found)


def _check(text: str, marker: FilePath, path: str, found: dict[str, None]) -> None:
    where = Where(path=path)
    if marker.or_name:
        if os.path.isabs(text):
            raise UserError(
                f"{text} is a path on this machine, which the daemon cannot read",
                where=where,
                hint="name a hub model, or one that the daemon has (`gym models list`)",
            )
        return
    if Path(text).is_dir():
        raise UserError(
            f"{text} is a folder; only single files are sent to a daemon",
            where=where,
            hint="name each of its files as a source of its own",
        )
    if not Path(text).is_file():
        raise UserError(f"there is no file {text}", where=where, hint="or name an upload: file:ID (`gym files list`)")
    found[text] = None


def _marker(shape: Shape) -> FilePath | None:
    markers = [part for _, constraints in shape.scalars for part in constraints if isinstance(part, FilePath)]
    return markers[0] if markers else None
