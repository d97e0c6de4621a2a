"""A finished run's artifact in another form."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gym_sdk.cli import console
from gym_sdk.errors import UserError, Where
from gym_sdk.rundir import RunDir
from gym_sdk.spec import RunSpec, load_spec
from gym_sdk.spec.adapter import adapters_beside
from gym_trainer.exporting.folder import Base, read_base, size_bytes
from gym_trainer.exporting.merge import MergeCheck, MergeDtype, merge_adapter
from gym_trainer.records import artifact_metadata

if TYPE_CHECKING:
    from gym_trainer.exporting.gguf.write import GgufFile, Quant


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    check: MergeCheck
    size_bytes: int


def export_merged(path: Path, out: Path, *, dtype: MergeDtype, adapter: str = "default") -> Exported:
    """Merge an adapter of a run, by its name, into the run's base.

    Raises:
        UserError: no such run, no adapter of this name in it (with what it has instead), or one that changes nothing.
        OutputInUse: `out` has something in it.
    """
    run, spec = open_finished(path)
    if not run.adapter_dir.is_dir():
        hint = f"it has a whole model: {run.model_dir}" if run.model_dir.is_dir() else f"its state: {run.state().value}"
        raise UserError("this run has no adapter to merge", where=Where(file=str(run.path)), hint=hint)
    folder = adapter_named(run, spec, adapter)
    base = base_of(spec)
    check = merge_adapter(
        base,
        folder,
        out,
        dtype=dtype,
        metadata=artifact_metadata(spec, run),
        quantization=spec.model.quantization,
    )
    return Exported(check=check, size_bytes=size_bytes(out))


@dataclass(frozen=True, kw_only=True)
class ExportedGguf:
    """What was written."""

    file: GgufFile
    modelfile: Path
    has_template: bool
    """Whether the Modelfile has the template of training; Ollama guesses one otherwise."""


def export_gguf(path: Path, out: Path, *, quant: Quant, adapter: str = "default") -> ExportedGguf:
    """A run's result as a GGUF file, with an Ollama Modelfile and a card beside it. An adapter is merged first.

    Raises:
        UserError: no such run, no result in it, or an adapter that changes nothing.
        ModelError: an architecture or tokenizer that readers of GGUF would not compute exactly.
        OutputInUse: `out` exists.
    """
    from gym_trainer.exporting.card import write_card_file
    from gym_trainer.exporting.gguf.families import family_of
    from gym_trainer.exporting.gguf.write import require_free, write_gguf
    from gym_trainer.exporting.ollama import write_modelfile

    run, spec = open_finished(path)
    require_free(out)
    folder = adapter_named(run, spec, adapter)
    base = base_of(spec)
    family_of(base.config())  # before a merge of minutes
    if folder.is_dir():
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.merged-", dir=out.parent) as scratch:
            merged = Path(scratch) / "model"
            merge_adapter(
                base,
                folder,
                merged,
                dtype="float32",
                metadata=artifact_metadata(spec, run),
                quantization=spec.model.quantization,
            )
            artifact = base.with_tokenizer_of(merged)
            file = write_gguf(merged, out, artifact, quant=quant, name=spec.name)
    elif run.model_dir.is_dir():
        artifact = base.with_tokenizer_of(run.model_dir)
        file = write_gguf(run.model_dir, out, artifact, quant=quant, name=spec.name)
    else:
        raise UserError("this run has no result to export", where=Where(file=str(run.path)), hint=run.state().value)
    modelfile = out.with_suffix(".Modelfile")
    has_template = write_modelfile(modelfile, out, artifact)
    if run.report_path("json").is_file():
        write_card_file(out.with_suffix(".md"), run, gguf=out.name)
    return ExportedGguf(file=file, modelfile=modelfile, has_template=has_template)


def adapter_named(run: RunDir, spec: RunSpec, name: str) -> Path:
    """The folder of one of a run's adapters; of `default` it may be missing.

    Raises:
        UserError: an adapter that the run does not have.
    """
    folder = run.named_adapter_dir(name)
    names = ["default", *(other.name for other in adapters_beside(spec.adapter))]
    if name not in names or (name != "default" and not folder.is_dir()):
        raise UserError(
            f"this run has no adapter {name}", where=Where(file=str(run.path)), hint=f"it has {', '.join(names)}"
        )
    return folder


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

    return read_base(spec, resolve(spec.model.source, revision=spec.model.revision, on_progress=say))
