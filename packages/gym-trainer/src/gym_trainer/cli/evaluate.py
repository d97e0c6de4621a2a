"""`gym eval`: the tasks of a run once more, on its result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gym_sdk.cli import console


def evaluate(
    run: Annotated[Path, Parameter(help="A run's folder.")],
    *,
    num_rows: Annotated[int | None, Parameter(help="So many rows of each task, instead of what the run used.")] = None,
    json: Annotated[bool, Parameter(negative="", help="For scripts.")] = False,
) -> int:
    """Answer a run's evaluation tasks again with its tuned model. The run's own results and report stay as they are."""
    from gym_trainer.run import require_torch

    require_torch("evaluation")
    from gym_trainer.evaluation.again import evaluate_again
    from gym_trainer.showing import results_table

    results = evaluate_again(run, num_rows=num_rows)
    if json:
        console.out_json([result.to_json() for result in results])
    else:
        console.out("\n\n".join(results_table(result) for result in results))
    return 0
