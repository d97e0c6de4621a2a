"""Write `docs/reference/run-yaml.md` from the run specification.

uv run python tools/generate_reference.py            # write
uv run python tools/generate_reference.py --check    # compare, for CI: exit 1 when the page is stale
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gym_sdk.spec._explain import example, unit_of
from gym_sdk.spec._fields import Field, fields_of
from gym_sdk.spec.run import RunSpec

PAGE = Path(__file__).resolve().parent.parent / "docs/reference/run-yaml.md"

INTRODUCTION = """\
<!-- Generated from gym_sdk.spec by tools/generate_reference.py. Do not edit. -->

# run.yaml

Every field of a run specification. `gym explain FIELD` says the same in a terminal, `gym schema` as JSON Schema for
editors.

The file is YAML 1.2 (or JSON): `2e-4` is a number, and `no`, `on` and `1:30` are text. A key that is not listed here is
an error. Relative paths are taken from the file's own folder, except `output.dir`, which is taken from the current one.
On the command line `train.learning_rate=1e-4` sets a field and `data.train[0].source=rows.jsonl` one of a list's item;
paths given there are taken from the current folder.
"""


def render() -> str:
    """The page as Markdown."""
    parts = [INTRODUCTION]
    sections = [field for field in fields_of(RunSpec) if field.children]
    parts.append(_table([field for field in fields_of(RunSpec) if not field.children]))
    for section in sections:
        parts.append(_section(section, depth=2))
    return "\n".join(parts)


def _section(section: Field, depth: int) -> str:
    title = section.path + ("[]" if section.shape.items is not None else "")
    required = " Required." if section.required else ""
    parts = [f"{'#' * depth} {title}\n", f"{section.doc}{required}\n"]
    shape = section.shape.items or section.shape
    if len(shape.kinds) > 1:
        for kind, model in shape.kinds.items():
            doc = " ".join((model.__doc__ or "").split())
            parts.append(f"{'#' * (depth + 1)} {title}, kind: {kind}\n\n{doc}\n")
            parts.append(_table([field for field in section.children if field.kind == kind and not field.children]))
            parts += [_section(field, depth + 2) for field in section.children if field.kind == kind and field.children]
        return "\n".join(parts)
    parts.append(_table([field for field in section.children if not field.children]))
    parts += [_section(field, depth + 1) for field in section.children if field.children]
    return "\n".join(parts)


def _table(fields: list[Field]) -> str:
    if not fields:
        return ""
    rows = ["| field | accepts | default | meaning |", "| --- | --- | --- | --- |"]
    for field in fields:
        unit = f" Unit: {unit_of(field)}." if unit_of(field) else ""
        default = f"required, such as `{example(field)}`" if field.required else f"`{field.default_text()}`"
        cells = (f"`{field.name}`", field.shape.describe(), default, field.doc + unit)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/reference/run-yaml.md.")
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    page = render()
    if parser.parse_args().check:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page:
            return 0
        sys.stderr.write("docs/reference/run-yaml.md is stale\nhint: uv run python tools/generate_reference.py\n")
        return 1
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
