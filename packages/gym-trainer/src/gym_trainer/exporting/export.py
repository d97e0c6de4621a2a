"""A finished run's artifact in another form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gym_sdk.cli import console
from gym_sdk.errors import UserError, Where
from gym_sdk.rundir import RunDir
from gym_sdk.spec import RunSpec, load_spec
from gym_trainer.exporting.folder import Base, size_bytes
from gym_trainer.exporting.merge import MergeCheck, MergeDtype, merge_adapter
from gym_trainer.records import artifact_metadata
from gym_trainer.run import require_torch


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    check: MergeCheck
    size_bytes: int


def export_merged(path: Path, out: Path, *, dtype: MergeDtype) -> Exported:
    """Merge a run's adapter into its base.

    Raises:
        UserError: no such run, no adapter in it (with what it has instead), or an adapter that changes nothing.
        OutputInUse: `out` has something in it.
    """
    require_torch("merging an adapter")
    run, spec = open_finished(path)
    if not run.adapter_dir.is_dir():
        hint = f"it has a whole model: {run.model_dir}" if run.model_dir.is_dir() else f"its state: {run.state().value}"
        raise UserError("this run has no adapter to merge", where=Where(file=str(run.path)), hint=hint)
    base = base_of(spec)
    check = merge_adapter(base, run.adapter_dir, out, dtype=dtype, metadata=artifact_metadata(spec, run))
    return Exported(check=check, size_bytes=size_bytes(out))


def open_finished(path: Path) -> tuple[RunDir, RunSpec]:
    """A run with the specification that it ran under."""
    run = RunDir.open(path)
    if not run.spec_path.is_file():
        raise UserError("this run ended before it began", where=Where(file=str(run.path)))
    return run, load_spec(run.spec_path)


def base_of(spec: RunSpec) -> Base:
    """The base model of a run, downloaded or converted again where it is not on this machine any more."""
    from gym_serve.models import resolve

    def say(stage: str, done: int, total: int | None, unit: str) -> None:
        if done == 0:
            size = f", {console.format_amount(total, None, unit)}" if total else ""
            console.err(f"{stage}{size}")

    return Base.of(resolve(spec.model.source, revision=spec.model.revision, on_progress=say))
