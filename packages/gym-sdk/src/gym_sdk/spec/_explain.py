"""What a field means, for `gym explain` and the reference page."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

from gym_sdk.errors import UserError
from gym_sdk.spec._fields import Field, all_fields, fields_of, format_value
from gym_sdk.spec._problems import OTHER_NAMES
from gym_sdk.spec.run import RunSpec

UNITS = {
    "_s": "seconds",
    "_gb": "GB (10^9 bytes)",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_steps": "optimizer steps",
    "_ratio": "share of the whole, 0 to 1",
}
"""By the end of the name."""


def unit_of(field: Field) -> str | None:
    """The unit that the field's name ends in."""
    return next((unit for suffix, unit in UNITS.items() if field.name.endswith(suffix)), None)


def find_fields(path: str) -> list[Field]:
    """The fields that a path means: several where kinds share a name (`adapter.rank`).

    `data.train[0].source`, `data.train[].source` and `data.train.source` mean the same; a kind may stand in the path
    (`adapter.lora`, `adapter.lora.rank`). Raises UserError with the nearest path.
    """
    wanted = re.sub(r"\[\d*\]", "", path.partition("=")[0]).strip(".")
    names: dict[str, list[Field]] = {}
    for field in all_fields(RunSpec):
        plain = field.path.replace("[]", "")
        names.setdefault(plain, []).append(field)
        if field.kind is not None:
            section, _, name = plain.rpartition(".")
            names.setdefault(f"{section}.{field.kind}.{name}", []).append(field)
    if wanted in names:
        return names[wanted]
    last = wanted.rsplit(".", 1)[-1]
    if last in OTHER_NAMES:
        raise UserError(f"there is no field {path}", hint=f"it is called {OTHER_NAMES[last]} here")
    same_name = [known for known in names if known.rsplit(".", 1)[-1] == last]
    near = same_name or difflib.get_close_matches(wanted, list(names), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near[:3])}?" if near else "`gym explain` lists every field"
    raise UserError(f"there is no field {path}", hint=hint)


def kind_fields(path: str) -> tuple[Field, str] | None:
    """The section and kind that a path like `method.sft`, or `sft` alone, means; None where it means neither."""
    section, _, kind = re.sub(r"\[\d*\]", "", path).rpartition(".")
    for field in all_fields(RunSpec):
        shape = field.shape.items or field.shape
        if section in (field.path.replace("[]", ""), "") and kind in shape.kinds:
            return field, kind
    return None


def explain_tree() -> str:
    """Every field with type and default, indented by section."""
    lines: list[str] = []

    def add(fields: tuple[Field, ...], depth: int) -> None:
        for field in fields:
            default = "" if field.children else f" = {field.default_text()}"
            kind = f" ({field.kind})" if field.kind else ""
            sub = "[]" if field.shape.items is not None and field.children else ""
            text = "" if field.children else f": {field.shape.describe()}"
            lines.append(f"{'  ' * depth}{field.name}{sub}{kind}{text}{default}")
            add(field.children, depth + 1)

    add(fields_of(RunSpec), 0)
    return "\n".join(lines)


def explain(path: str) -> str:
    """A field, a section, or a kind of one, in words. Raises UserError for a path that is none."""
    if (found := kind_fields(path)) is not None:
        section, kind = found
        model = (section.shape.items or section.shape).kinds[kind]
        parts = [f"{section.path} kind {kind}", "", f"  {_one_line(model.__doc__)}", ""]
        parts += _rows([field for field in section.children if field.kind in (kind, None) and field.owner is model])
        return "\n".join(parts)
    fields = find_fields(path)
    if fields[0].name == "kind":
        fields = find_fields(path.rpartition(".")[0])
    return "\n\n".join(_explain_field(field) for field in fields)


def _explain_field(field: Field) -> str:
    around = ", ".join(f"{section} kind {kind}" for section, kind in field.within)
    title = f"{field.path} (of {around})" if around else field.path
    default = "required" if field.required else f"default {field.default_text()}"
    lines = [title, f"  {field.shape.describe()}; {default}"]
    if unit := unit_of(field):
        lines.append(f"  unit: {unit}")
    lines += ["", f"  {field.doc}"]
    shape = field.shape.items or field.shape
    if shape.kinds:
        lines += ["", "  kinds:"]
        width = max(map(len, shape.kinds))
        lines += [f"    {kind:<{width}}  {_one_line(model.__doc__)}" for kind, model in shape.kinds.items()]
    if field.children:
        lines += ["", *_rows(list(field.children))]
    else:
        lines += ["", f"  example: {field.path.replace('[]', '[0]')}={example(field)}"]
    return "\n".join(lines)


def _rows(fields: list[Field]) -> list[str]:
    names = [f"{field.name} ({field.kind})" if field.kind else field.name for field in fields]
    width = max(map(len, names))
    rows = []
    for name, field in zip(names, fields, strict=True):
        rows.append(f"  {name:<{width}}  {field.shape.describe()}; {field.default_text()}")
        rows.append(f"  {'':<{width}}  {field.doc}")
    return rows


def example(field: Field) -> str:
    """A value that the field takes, other than its default where there is a choice."""
    info = field.owner.model_fields[field.name]
    if info.examples:
        given = info.examples[0]
        return json.dumps(given) if isinstance(given, dict) else format_value(given, bare=True)
    shape = field.shape
    if shape.choices:
        return str(next((choice for choice in shape.choices if choice != field.default), shape.choices[0]))
    if field.default not in (None, [], {}) and not isinstance(field.default, bool):
        return format_value(field.default, bare=True)
    kinds = [kind for kind, _ in shape.scalars]
    if bool in kinds:
        return "false" if field.default else "true"
    if int in kinds:
        limits = [getattr(part, "ge", None) for _, constraints in shape.scalars for part in constraints]
        return str(max([100, *(limit for limit in limits if limit is not None)]))
    return "0.5" if float in kinds else "[]" if shape.items else "{}" if shape.values else "text"


def field_data(field: Field) -> dict[str, Any]:
    """A field for scripts."""
    default = None if field.required or field.children else field.default
    return {
        "path": field.path,
        "kind": field.kind,
        "type": field.shape.describe(),
        "required": field.required,
        "default": default,
        "unit": unit_of(field),
        "doc": field.doc,
    }


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
