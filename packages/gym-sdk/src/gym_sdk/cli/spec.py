"""`gym explain`, `gym schema` and `gym spec`: the run specification for people, editors and scripts."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import App, Parameter

from gym_sdk.cli import console
from gym_sdk.errors import SpecError

AsJson = Annotated[bool, Parameter(name="--json", negative="")]

app: App = App(name="gym spec", help="Check and show run specifications.", version_flags=[])


def explain(field: str | None = None, /, *, as_json: AsJson = False) -> None:
    """Say what a field of run.yaml means: type, range, default, unit.

    Parameters
    ----------
    field
        A path such as train.learning_rate, a section such as data, or a kind such as sft or adapter.lora. All fields
        when left out.
    as_json
        Print JSON.
    """
    from gym_sdk.spec import _explain
    from gym_sdk.spec._fields import all_fields
    from gym_sdk.spec.run import RunSpec

    if as_json:
        fields = list(all_fields(RunSpec)) if field is None else _explain.find_fields(field)
        console.out_json([_explain.field_data(each) for each in fields])
    else:
        console.out(_explain.explain_tree() if field is None else _explain.explain(field))


def schema() -> None:
    """Print the JSON Schema of run.yaml (draft 2020-12).

    An editor with a YAML language server completes and checks a run.yaml whose first line is
    `# yaml-language-server: $schema=run.schema.json`, after `gym schema > run.schema.json`.
    """
    from gym_sdk.spec._schema import json_schema

    console.out_json(json_schema())


@app.command
def validate(path: str, /, *overrides: str, as_json: AsJson = False) -> int:
    """Check a specification without running it.

    Parameters
    ----------
    path
        The file.
    overrides
        Fields to set, such as train.learning_rate=1e-4.
    as_json
        Print the result as JSON: valid, problems.
    """
    from gym_sdk.spec import load_spec, sha256

    try:
        spec = load_spec(path, overrides)
    except SpecError as error:
        if not as_json:
            raise
        problems = [
            {"message": p.message, "file": p.where.file, "line": p.where.line, "path": p.where.path, "hint": p.hint}
            for p in error.problems
        ]
        console.out_json({"valid": False, "problems": problems})
        return error.exit_code
    if as_json:
        console.out_json({"valid": True, "problems": [], "sha256": sha256(spec)})
    else:
        console.err(f"{path} is valid")
    return 0


@app.command
def show(path: str, /, *overrides: str, as_json: AsJson = False) -> None:
    """Print a specification with every default and override filled in.

    Parameters
    ----------
    path
        The file.
    overrides
        Fields to set, such as train.learning_rate=1e-4.
    as_json
        Print JSON instead of YAML.
    """
    from gym_sdk.spec import canonical_json, dump_yaml, load_spec

    spec = load_spec(path, overrides)
    if as_json:
        console.out_json(json.loads(canonical_json(spec)))
    else:
        console.out(dump_yaml(spec).rstrip("\n"))
