"""What the specification's fields accept, in words: the one description behind messages, help, reference and schema."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

Model = type[BaseModel]
SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$": "of at most 63 letters (a to z), digits, dots, dashes and underscores, "
    "beginning with a letter or digit",
    r"^[a-z][a-z0-9_]*$": "of small letters, digits and underscores",
    r"^https?://\S+$": "that begins with http:// or https://",
    r"^[A-Za-z_]\w*$": "that is the name of a variable",
    r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$": "of the form module:function",
}
"""The patterns of fields in words: a regular expression teaches nobody."""
BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


@dataclass(frozen=True)
class Shape:
    """What a value may be: any one of the parts that are set."""

    scalars: tuple[tuple[type, tuple[Any, ...]], ...] = ()
    """Types with their constraints."""
    choices: tuple[Any, ...] = ()
    items: Shape | None = None
    """The items of a list."""
    min_items: int = 0
    values: Shape | None = None
    """The values of a mapping with free keys."""
    models: tuple[Model, ...] = ()
    nullable: bool = False

    @property
    def kinds(self) -> dict[str, Model]:
        """The models that a `kind:` key chooses between; empty where there is no such key."""
        return {model.model_fields["kind"].default: model for model in self.models if "kind" in model.model_fields}

    def describe(self) -> str:
        """The accepted values in words: `a whole number of at least 1, or auto`."""
        parts = [_scalar(kind, constraints) for kind, constraints in self.scalars]
        if self.choices:
            names = [format_value(choice, bare=True) for choice in self.choices]
            parts.append(names[0] if len(names) == 1 else f"one of {', '.join(names)}")
        if self.items is not None:
            number = "non-empty list" if self.min_items else "list"
            inner = self.items
            parts.append(
                f"a {number} of mappings" if inner.models else f"a {number} of {inner.describe().removeprefix('a ')}"
            )
        if self.values is not None:
            parts.append(f"a mapping of names to {self.values.describe().removeprefix('a ')}")
        if self.kinds:
            parts.append(f"a mapping whose kind is one of {', '.join(self.kinds)}")
        elif self.models:
            parts.append(f"a mapping with the keys {', '.join(self.models[0].model_fields)}")
        if self.nullable:
            parts.append("null")
        return ", or ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


@dataclass(frozen=True)
class Field:
    """One field of the specification."""

    path: str
    """As a person writes it; items of a list by `[]`: `data.train[].source`."""
    name: str
    shape: Shape
    doc: str
    required: bool
    default: Any
    owner: Model
    kind: str | None = None
    """The kind of adapter, method or task that the field belongs to, where there are several."""
    within: tuple[tuple[str, str], ...] = ()
    """Sections around it that must be of a kind for it to exist: `(("method", "dpo"),)`."""
    children: tuple[Field, ...] = field(default=(), repr=False)

    def default_text(self) -> str:
        """The default in YAML's flow style; "required" where there is none."""
        if self.required:
            return "required"
        value = self.default
        if isinstance(value, BaseModel):
            return "{}" if not hasattr(value, "kind") else f"{{kind: {value.kind}}}"  # pyright: ignore[reportAttributeAccessIssue]
        return format_value(value, bare=True)


def shape_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> Shape:
    """The shape of a type annotation."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        extra = [item for part in arguments[1:] for item in (part.metadata if isinstance(part, FieldInfo) else [part])]
        return shape_of(arguments[0], (*metadata, *extra))
    if origin in (Union, types.UnionType):
        return _merge([shape_of(part, metadata) for part in arguments])
    if origin is Literal:
        return Shape(choices=arguments)
    if annotation is type(None):
        return Shape(nullable=True)
    if origin in (list, tuple):
        minimum = max((part.min_length for part in metadata if isinstance(part, annotated_types.MinLen)), default=0)
        return Shape(items=shape_of(arguments[0]), min_items=minimum)
    if origin is dict:
        return Shape(values=shape_of(arguments[1]))
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return Shape(models=(annotation,))
    if annotation in SCALARS:
        return Shape(scalars=((annotation, metadata),))
    raise TypeError(f"a specification field of type {annotation!r} has no description")


def field_shape(info: FieldInfo) -> Shape:
    return shape_of(info.annotation, tuple(info.metadata))


def fields_of(
    model: Model, prefix: str = "", kind: str | None = None, within: tuple[tuple[str, str], ...] = ()
) -> tuple[Field, ...]:
    """The fields of a model and, as their children, everything below them."""
    found = []
    for name, info in model.model_fields.items():
        path = f"{prefix}.{name}" if prefix else name
        shape = field_shape(info)
        inner, below = (shape.items, f"{path}[]") if shape.items is not None else (shape, path)
        children: list[Field] = []
        for child in inner.models:
            owner_kind = child.model_fields["kind"].default if inner.kinds else None
            around = (*within, (below, owner_kind)) if owner_kind is not None else within
            children += fields_of(child, below, owner_kind, around)
        default = info.get_default(call_default_factory=True)
        found.append(
            Field(
                path=path,
                name=name,
                shape=shape,
                doc=" ".join((info.description or "").split()),
                required=info.is_required(),
                default=None if default is PydanticUndefined else default,
                owner=model,
                kind=kind,
                within=within,
                children=tuple(children),
            )
        )
    return tuple(found)


def all_fields(model: Model) -> Iterator[Field]:
    """Every field of the specification, parents before children."""

    def walk(fields: tuple[Field, ...]) -> Iterator[Field]:
        for each in fields:
            yield each
            yield from walk(each.children)

    yield from walk(fields_of(model))


def format_value(value: Any, *, bare: bool = False, limit: int = 60) -> str:
    """A value as a person would write it in YAML; text in quotes unless `bare`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and bare:
        text = value
    elif isinstance(value, float):
        text = f"{value:g}" if float(f"{value:g}") == value else repr(value)
        text = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(text, text)
    elif isinstance(value, BaseModel | dict):
        text = "{}" if not value else "a mapping"
    elif isinstance(value, list) and not bare and value:
        text = "a list"
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _merge(shapes: list[Shape]) -> Shape:
    def only(values: list[Shape]) -> Shape | None:
        return values[0] if values else None

    return Shape(
        scalars=tuple(scalar for shape in shapes for scalar in shape.scalars),
        choices=tuple(choice for shape in shapes for choice in shape.choices),
        items=only([shape.items for shape in shapes if shape.items is not None]),
        min_items=max(shape.min_items for shape in shapes),
        values=only([shape.values for shape in shapes if shape.values is not None]),
        models=tuple(model for shape in shapes for model in shape.models),
        nullable=any(shape.nullable for shape in shapes),
    )


def _scalar(kind: type, constraints: tuple[Any, ...]) -> str:
    bounds: dict[str, str] = {}
    pattern = None
    non_empty = False
    for constraint in constraints:
        for bound in BOUNDS:
            if (limit := getattr(constraint, bound, None)) is not None:
                bounds[bound] = format_value(limit)
        pattern = getattr(constraint, "pattern", None) or pattern
        non_empty = non_empty or bool(getattr(constraint, "min_length", 0))
    text = SCALARS[kind]
    if kind is str and non_empty:
        text += " that is not empty"
    if pattern:
        text += f" {PATTERNS.get(pattern) or f'of the form {pattern}'}"
    if "ge" in bounds and "le" in bounds:
        return f"{text} from {bounds['ge']} to {bounds['le']}"
    limits = " and ".join(BOUNDS[bound].format(limit) for bound, limit in bounds.items())
    if limits:
        text += f" of {limits}" if limits.startswith("at ") else f" {limits}"
    return text
