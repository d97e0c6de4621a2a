"""The tasks of a finished run, answered again by its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_sdk.cli import console
from gym_sdk.errors import UserError, Where
from gym_sdk.rundir import RunDir
from gym_sdk.spec import EvaluationSpec, RunSpec
from gym_sdk.spec.adapter import is_whole_model
from gym_trainer.evaluation.json_fields import JsonFieldsResult
from gym_trainer.evaluation.run import load_tasks, run_tasks
from gym_trainer.exporting.export import base_of, open_finished
from gym_trainer.exporting.folder import Base
from gym_trainer.run import check_inputs


def evaluate_again(path: Path, *, num_rows: int | None = None) -> list[JsonFieldsResult]:
    """Load the run's artifact as anyone would, from its folder, and measure it.

    Raises:
        UserError: no such run, no result in it, or no task in its specification.
    """
    run, spec = open_finished(path)
    if not spec.evaluation.tasks:
        raise UserError(
            "this run's specification has no evaluation task",
            where=Where(file=str(run.spec_path), path="evaluation.tasks"),
            hint="gym explain evaluation.tasks",
        )
    if num_rows is not None:
        tasks = [task.model_copy(update={"num_rows": num_rows}) for task in spec.evaluation.tasks]
        spec = spec.model_copy(update={"evaluation": EvaluationSpec(tasks=tasks)})
    check_inputs(spec)
    base = base_of(spec)
    loaded = load_tasks(spec, base.renderer)
    model = load_result(run, spec, base)
    total = sum(len(task.questions) for task in loaded)
    with console.progress(total, "answers", "evaluating") as bar:
        return run_tasks(
            loaded, model, base.tokenizer, base.renderer.stop_ids, on_progress=lambda done, _: bar.update(done)
        )


def load_result(run: RunDir, spec: RunSpec, base: Base) -> Any:
    """The tuned model: the whole one, or the base with the adapter on it."""
    from dataclasses import replace

    from gym_serve.models import load_adapter, load_model
    from gym_trainer.planning import detect

    dtype = spec.model.dtype
    device = detect(spec.performance.device).kind
    if run.model_dir.is_dir() and is_whole_model(spec.adapter):
        resolved = replace(base.resolved, source=str(run.model_dir), folder=run.model_dir, known_content_id=None)
        return load_model(resolved, dtype=dtype, device=device)
    if not run.adapter_dir.is_dir():
        raise UserError(
            "this run has no result yet", where=Where(file=str(run.path)), hint=f"gym train --resume {run.path}"
        )
    model = load_model(base.resolved, dtype=dtype, device=device, quantization=spec.model.quantization)
    return load_adapter(model, run.adapter_dir)
