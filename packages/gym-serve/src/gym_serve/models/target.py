"""What a user names to be served or talked to: a run, an adapter, a library of experiences, or a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from gym_data.experience import LIBRARY_FILE, ExperienceLibrary, read_library
from gym_sdk.errors import ModelError, UserError
from gym_sdk.rundir import RunDir
from gym_serve.models.adapters import CONFIG, inspect_adapter
from gym_serve.models.progress import ProgressCallback
from gym_serve.models.resolution import ResolvedModel, resolve


@dataclass(frozen=True, kw_only=True)
class ServeTarget:
    """A base model, and perhaps an adapter on it or a library of experiences in front of it."""

    name: str
    """For people and as a model id: the run's or folder's name, or the source as given."""
    base: ResolvedModel
    adapter: Path | None = None
    experiences: ExperienceLibrary | None = None
    system: str | None = None
    """The system message with which every row of the run's training began."""


def open_target(target: str, *, on_progress: ProgressCallback | None = None) -> ServeTarget:
    """Find what `target` names: a run directory (its final adapter, model or library of experiences), an adapter
    folder, or a model source.

    Raises:
        ModelError: the run has nothing to serve yet, or its base cannot be found; else as `resolve`.
    """
    path = Path(target).expanduser()
    if (path / "run.json").is_file():
        return _run(RunDir.open(path), on_progress)
    if (path / CONFIG).is_file():
        info = inspect_adapter(path)
        if info.base is None:
            raise ModelError(f"the adapter {path} does not say what its base is", hint="name its run instead")
        return ServeTarget(name=path.name, base=resolve(info.base, on_progress=on_progress), adapter=path)
    return ServeTarget(name=_name_of(target), base=resolve(target, on_progress=on_progress))


def _run(run: RunDir, on_progress: ProgressCallback | None) -> ServeTarget:
    if (run.model_dir / "config.json").is_file():
        base = resolve(str(run.model_dir), on_progress=on_progress)
        return ServeTarget(name=run.path.name, base=base, system=_system_of(run))
    if (run.experience_dir / LIBRARY_FILE).is_file():
        library = read_library(run.experience_dir)
        return ServeTarget(name=run.path.name, base=_base_of(run, on_progress), experiences=library)
    if not (run.adapter_dir / CONFIG).is_file():
        raise ModelError(
            f"the run {run.path.name} has no model yet; it is {_state_of(run)}",
            hint=f"finish it with `gym train --resume {run.path}`",
        )
    return ServeTarget(
        name=run.path.name, base=_base_of(run, on_progress), adapter=run.adapter_dir, system=_system_of(run)
    )


def _base_of(run: RunDir, on_progress: ProgressCallback | None) -> ResolvedModel:
    from gym_sdk.spec import load_spec

    model = load_spec(run.spec_path).model
    return resolve(model.source, revision=model.revision, on_progress=on_progress)


def _system_of(run: RunDir) -> str | None:
    try:
        systems = json.loads((run.data_dir / "report.json").read_bytes())["systems"]
    except (OSError, ValueError, KeyError):  # a run without prepared rows, or of an earlier version
        return None
    return systems[0] or None if len(systems) == 1 else None


def _state_of(run: RunDir) -> str:
    try:
        state = run.state()
    except UserError:
        return "not readable"
    return str(getattr(state, "name", state)).lower()


def _name_of(source: str) -> str:
    name = source.rstrip("/").rsplit("/", 1)[-1]
    return name.removesuffix(".gguf") if source.endswith(".gguf") or Path(source).exists() else source
