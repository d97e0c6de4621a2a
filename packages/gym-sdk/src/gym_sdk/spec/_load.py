"""From a file, a text or plain data to a RunSpec, with every fault in one message."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from gym_sdk.errors import SpecError, Where
from gym_sdk.spec._document import Document, Path, parse_json, parse_yaml
from gym_sdk.spec._fields import Shape, field_shape
from gym_sdk.spec._overrides import apply
from gym_sdk.spec._paths import absolute_paths
from gym_sdk.spec._problems import Reporter
from gym_sdk.spec.run import RunSpec

ROOT = Shape(models=(RunSpec,))


def load_spec(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunSpec:
    """Read a run specification from a YAML or JSON file.

    `overrides` are `a.b[0].c=value` texts. Relative paths of data, models and adapters become absolute: those in the
    file are taken from the file's folder, those in overrides from the current folder.

    Raises SpecError with every fault of the file: place, what was given, what is allowed.
    """
    file = FilePath(path)
    name = str(path)
    if not name:
        raise SpecError("the specification's file has no name", hint="gym train run.yaml")
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise SpecError("there is no such file", where=Where(file=name), hint=_missing_hint(file)) from None
    except IsADirectoryError:
        raise SpecError("is a folder; give the specification's file", where=Where(file=name)) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise SpecError("not UTF-8 text", where=Where(file=name, line=line), hint="save the file as UTF-8") from None
    except ValueError:
        raise SpecError("a file's name cannot hold U+0000", where=Where(file=name)) from None
    except OSError as error:
        raise SpecError(f"cannot be read: {error.strerror}", where=Where(file=name)) from None
    document = parse_json(text, name) if file.suffix.lower() == ".json" else parse_yaml(text, name)
    return _validate(document, name, base=file.parent.absolute(), overrides=overrides)


def parse_spec(text: str, *, name: str = "spec_json") -> RunSpec:
    """Read a run specification from JSON, as it comes over the wire. Paths are left as they are.

    `name` stands for the text in messages. Raises SpecError.
    """
    return _validate(parse_json(text, name), name, base=None)


def spec_from_data(data: Mapping[str, Any], *, name: str = "spec", overrides: Sequence[str] = ()) -> RunSpec:
    """A run specification from plain data, such as a form's. Paths are left as they are. Raises SpecError."""
    return _validate(Document(data=dict(data)), name, base=None, overrides=overrides)


def _validate(document: Document, name: str, *, base: FilePath | None, overrides: Sequence[str] = ()) -> RunSpec:
    data, touched = document.data, set[Path]()
    if data is None and not overrides:
        raise SpecError("is empty; a run needs at least model and data", where=Where(file=name), hint="gym explain")
    if data is not None and not isinstance(data, dict):
        raise SpecError(f"must be {ROOT.describe()}", where=Where(file=name), hint="gym explain")
    data = data or {}
    if base is not None:
        data = absolute_paths(data, ROOT, base)
    data, touched = apply(data, overrides, ROOT)
    data = _with_default_kinds(data, ROOT)
    reporter = Reporter(Document(data, document.lines), ROOT, name, touched)
    try:
        if not (problems := reporter.unusable_values()):
            return RunSpec.model_validate(data)
    except ValidationError as error:
        problems = reporter.problems(error)
    first = problems[0].where.path or ""
    hint = f"gym explain {first.split('.')[0].split('[')[0]}" if _is_field(first) else "gym explain"
    raise SpecError.of(problems, name=name, hint=hint)


def _with_default_kinds(data: Any, shape: Shape) -> Any:
    """A section without `kind` is of the kind that it would have if it were left out: `adapter: {rank: 8}` is lora."""
    if not isinstance(data, dict) or len(shape.models) != 1:
        return data
    result = dict(data)
    for name, info in shape.models[0].model_fields.items():
        inner, value = field_shape(info), result.get(name)
        default = getattr(info.get_default(call_default_factory=True), "kind", None)
        if isinstance(value, dict) and "kind" not in value and inner.kinds and default is not None:
            result[name] = {"kind": default, **value}
        elif inner.models and not inner.kinds:
            result[name] = _with_default_kinds(value, inner) if name in result else None
            if name not in data:
                del result[name]
    return result


def _is_field(path: str) -> bool:
    return path.split(".")[0].split("[")[0] in RunSpec.model_fields


def _missing_hint(file: FilePath) -> str | None:
    try:
        others = sorted(p.name for p in file.parent.iterdir() if p.suffix in (".yaml", ".yml", ".json"))
    except OSError:
        return f"there is no folder {file.parent}"
    return f"{file.parent} has {', '.join(others[:5])}" if others else None
