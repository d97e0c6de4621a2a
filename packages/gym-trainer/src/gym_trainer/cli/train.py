"""`gym train`: from a specification to a result, or on from where a run stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gym_sdk.cli import console
from gym_sdk.errors import UserError
from gym_sdk.events import RunState

PAUSED_EXIT_CODE = 130
"""As of a process that Ctrl-C ended."""


def train(
    spec: Annotated[Path | None, Parameter(help="The specification, a YAML or JSON file.")] = None,
    *overrides: Annotated[str, Parameter(help="Values to change, such as train.learning_rate=1e-4.")],
    resume: Annotated[
        str | None, Parameter(help="A run's folder, or its URL in an output.mirror, to go on with instead.")
    ] = None,
    price: Annotated[
        str | None, Parameter(help="Of this machine, such as 2.5/h, for the cost; output.price_per_hour of a run.")
    ] = None,
    quiet: Annotated[bool, Parameter(negative="", help="Nothing on standard error but warnings and errors.")] = False,
) -> int:
    """Fine-tune a model. Prints the run's folder when it is done; everything else goes to standard error."""
    from gym_trainer.run import resume_run, start_run

    if resume is not None:
        if spec is not None or overrides or price is not None:
            raise UserError(
                "a resumed run keeps the specification that it began with",
                hint=f"gym train --resume {resume}, or start a new run with other values",
            )
        run = resume_run(resume, quiet=quiet)
    elif spec is None:
        raise UserError("there is no specification", hint="gym train run.yaml; examples/ has some to start from")
    else:
        from gym_sdk.spec import load_spec
        from gym_trainer.cli.plan import parse_price

        if (price_per_hour := parse_price(price)) is not None:
            overrides = (*overrides, f"output.price_per_hour={price_per_hour}")
        run = start_run(load_spec(spec, overrides), quiet=quiet)
    console.out(str(run.path))
    return PAUSED_EXIT_CODE if run.state() is RunState.PAUSED else 0
