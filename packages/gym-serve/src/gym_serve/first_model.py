"""The model that `gym serve MODEL` names: found, or refused, before the daemon listens."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gym_data.experience import LIBRARY_FILE
from gym_sdk.errors import ModelError, UserError, Where
from gym_sdk.rundir import RunDir
from gym_sdk.spec import TrainingFreeGrpo, load_spec
from gym_serve.catalog import EVERYONE, Catalog, Model
from gym_serve.models import inspect_adapter
from gym_serve.models.adapters import CONFIG
from gym_serve.models.resolution import check_source


async def register(catalog: Catalog, source: str) -> Model:
    """Puts into the catalog what the operator names: a run's result, an adapter's folder, or a base by its source.

    Raises `ModelError` for a model that is not there or is none, and `UserError` for a run that has made nothing yet.
    """
    path = Path(source).expanduser()
    if (path / "run.json").is_file():
        return await _register_run(catalog, RunDir.open(path.absolute()))
    if (path / CONFIG).is_file():
        named = inspect_adapter(path).base
        if named is None:
            raise ModelError(f"the adapter {path} does not say what its base is", hint="serve its run instead")
        base = catalog.find(EVERYONE, named) or await _base(catalog, named)
        return await catalog.add_adapter(path, base, model_id=path.absolute().name, owner=EVERYONE)
    return await _base(catalog, source)


async def _register_run(catalog: Catalog, run: RunDir) -> Model:
    spec = await asyncio.to_thread(load_spec, run.spec_path)
    model = spec.model
    name = run.path.name
    if (run.experience_dir / LIBRARY_FILE).is_file():
        # The model's name is the endpoint's, which may have been this daemon with another source for it.
        names = [*([spec.method.student.model] if isinstance(spec.method, TrainingFreeGrpo) else []), model.source]
        found = next((found for each in names if each and (found := catalog.find(EVERYONE, each))), None)
        carrier = found or await _base(catalog, model.source, model.revision)
        return await catalog.add_experiences(run.experience_dir, carrier, model_id=name, owner=EVERYONE)
    if run.adapter_dir.is_dir():
        base = await _base(catalog, model.source, model.revision)
        return await catalog.add_adapter(run.adapter_dir, base, model_id=name, owner=EVERYONE)
    if run.model_dir.is_dir():
        return await _base(catalog, str(run.model_dir), model_id=name)
    raise UserError(
        f"the run has made no model yet; it is {run.state()}",
        where=Where(file=str(run.path)),
        hint=f"gym train --resume {run.path}",
    )


async def _base(catalog: Catalog, source: str, revision: str | None = None, model_id: str | None = None) -> Model:
    await asyncio.to_thread(check_source, source, revision=revision)
    path = Path(source).expanduser()
    # As an absolute path: jobs and later daemons read it from other folders.
    named = str(path.absolute()) if path.exists() else source
    return await catalog.add_base(named, revision=revision, model_id=model_id)
