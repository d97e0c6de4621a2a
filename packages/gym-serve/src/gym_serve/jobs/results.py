"""What a finished run leaves: files to download, and a model to talk to."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from gym_data.experience import LIBRARY_FILE
from gym_sdk.errors import GymError, ModelError
from gym_sdk.events import MetricEvent, read_events
from gym_sdk.rundir import RunDir
from gym_serve._database import Database
from gym_serve.catalog import Catalog, Model, ModelKind, tuned_name
from gym_serve.files.announced import RESULT_PURPOSE
from gym_serve.files.service import FileService
from gym_serve.jobs import store
from gym_serve.jobs.model import Artifact, Job, checkpoint_name

logger: logging.Logger = logging.getLogger(__name__)


_GIVE_NUMBERS = ("reward", "classification")
"""Methods whose results score or sort texts instead of writing them."""


class JobResults:
    """Registers what a run has made. Each step may be done again: ids follow from the job's own."""

    def __init__(
        self,
        database: Database,
        files: FileService,
        catalog: Catalog,
        load: Callable[[Model], Awaitable[None]],
    ) -> None:
        """`load` puts a model into the engine, where its base is there already; it raises `ModelError` for a model that
        does not fit."""
        self._database = database
        self._files = files
        self._catalog = catalog
        self._load = load

    async def register(self, job: Job, run_dir: Path) -> str | None:
        """Keeps the run's files, makes its model servable, and returns the model's id.

        None for what is no model of this daemon: a scorer, a classifier, a library for a model served elsewhere.
        """
        run = await asyncio.to_thread(RunDir.open, run_dir)
        model = await self.register_model(job, run)
        artifacts = [
            await self._keep(job, kind, path, folder)
            for kind, path, folder in await asyncio.to_thread(_artifact_files, run)
        ]
        metrics = await asyncio.to_thread(_metrics_csv, run)
        file = await self._files.keep_result(
            job.owner, _file_id(job, "metrics", "step_metrics.csv"), "step_metrics.csv", RESULT_PURPOSE, metrics
        )
        artifacts.append(
            Artifact(
                kind="metrics", path=file.filename, file_id=file.id, size_bytes=file.size_bytes, sha256=file.sha256
            )
        )
        await self._database.write(lambda connection: store.set_artifacts(connection, job.id, artifacts))
        return model.id if model is not None else None

    async def register_model(self, job: Job, run: RunDir) -> Model | None:
        """The model of a run, in the catalog and, where its base is loaded, in the engine."""
        spec = json.loads(job.spec_json)
        if (run.experience_dir / LIBRARY_FILE).is_file():
            return await self._register_experiences(job, run, spec)
        if spec["method"]["kind"] in _GIVE_NUMBERS:
            return None
        base = await self._base(spec["model"]["source"], spec["model"]["revision"])
        model_id = self._tuned_name(base, job)
        lineage = {"spec_sha256": job.spec_sha256}
        if parent := (spec.get("adapter") or {}).get("init_from"):
            lineage["parent_model_id"] = parent
        if run.adapter_dir.is_dir():
            model = await self._catalog.add_adapter(
                run.adapter_dir, base, model_id=model_id, owner=job.owner, job_id=job.id, lineage=lineage
            )
        elif run.model_dir.is_dir():
            model = await self._catalog.add_tuned_base(
                run.model_dir, model_id=model_id, owner=job.owner, job_id=job.id, lineage=lineage
            )
        else:
            raise ModelError("the run left no adapter, no model and no experiences")
        try:
            await self._load(model)
        except GymError:
            await self._catalog.discard(model)
            raise
        return model

    async def _register_experiences(self, job: Job, run: RunDir, spec: dict[str, Any]) -> Model | None:
        """A library in front of the model that it was learned with. That model answered at an endpoint, which need not
        be this daemon: a library is registered only where a model of that name is served here."""
        method = spec["method"]
        names = [name for name in (method["student"]["model"], spec["model"]["source"]) if name]
        carrier = next((found for name in names if (found := self._catalog.find(job.owner, name))), None)
        if carrier is None or carrier.kind is ModelKind.EXPERIENCES:
            logger.info("job %s: its library is kept as files; %s is not served here", job.id, " or ".join(names))
            return None
        lineage = {"spec_sha256": job.spec_sha256}
        if parent := method["library"]["initial"]:
            lineage["parent_model_id"] = parent
        return await self._catalog.add_experiences(
            run.experience_dir,
            carrier,
            model_id=self._tuned_name(carrier, job),
            owner=job.owner,
            job_id=job.id,
            lineage=lineage,
        )

    def _tuned_name(self, below: Model, job: Job) -> str:
        suffix = str(job.origin.get("suffix") or job.name)
        return tuned_name(self._catalog.base_of(below), suffix, job.id.rpartition("-")[2][-8:])

    async def register_checkpoint(self, job: Job, step: int, path: str) -> Model:
        """The adapter in a checkpoint, as a model of its own."""
        assert job.run_dir is not None
        spec = json.loads(job.spec_json)
        base = await self._base(spec["model"]["source"], spec["model"]["revision"])
        folder = Path(job.run_dir) / path
        if not folder.is_dir():
            raise ModelError(f"checkpoint {step} is not kept any more", hint="train.keep_checkpoints keeps more")
        return await self._catalog.add_adapter(
            folder,
            base,
            model_id=checkpoint_name(job, step),
            owner=job.owner,
            job_id=job.id,
            lineage={"spec_sha256": job.spec_sha256},
        )

    async def _base(self, name: str, revision: str | None) -> Model:
        source = self._catalog.base_source(name)
        return await self._catalog.add_base(source or name, revision=None if source else revision)

    async def _keep(self, job: Job, kind: str, path: Path, folder: Path) -> Artifact:
        name = path.relative_to(folder).as_posix()
        file = await self._files.keep_result(
            job.owner, _file_id(job, kind, name), path.name, RESULT_PURPOSE, path, link=kind == "model"
        )
        return Artifact(kind=kind, path=name, file_id=file.id, size_bytes=file.size_bytes, sha256=file.sha256)


def _artifact_files(run: RunDir) -> list[tuple[str, Path, Path]]:
    """The files worth keeping, as (kind, file, folder of the artifact)."""
    found: list[tuple[str, Path, Path]] = []
    kinds = (("adapter", run.adapter_dir), ("model", run.model_dir), ("experiences", run.experience_dir))
    for kind, folder in kinds:
        found += [(kind, path, folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    for suffix in ("json", "md", "html"):
        path = run.report_path(suffix)
        if path.is_file():
            found.append(("report", path, run.path))
    return found


def _metrics_csv(run: RunDir) -> bytes:
    """The run's metrics in the columns of OpenAI's result files, with Gym's own behind them."""
    rows: list[dict[str, object]] = []
    for event in read_events(run.events_path):
        if isinstance(event, MetricEvent):
            rows.append({"step": event.step, **event.values})
    names = dict.fromkeys(name for row in rows for name in row)
    target = io.StringIO()
    writer = csv.DictWriter(target, list(names) or ["step"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return target.getvalue().encode()


def _file_id(job: Job, kind: str, name: str) -> str:
    return f"file-{hashlib.sha256(f'{job.id}/{kind}/{name}'.encode()).hexdigest()[:24]}"
