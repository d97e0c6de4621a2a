"""Jobs, as both HTTP and gRPC call them: create, look, follow, cancel, pause, resume, retry, delete."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import secrets
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from gym_sdk.spec import RunSpec, canonical_json, parse_spec, sha256
from gym_serve._changes import Changes
from gym_serve._database import Database
from gym_serve.auth import Key, require_admin
from gym_serve.errors import Reason, ServiceError, invalid, not_found
from gym_serve.files.service import FileService
from gym_serve.jobs import store
from gym_serve.jobs.admission import ModelLookup, admit, check_rows, place_files
from gym_serve.jobs.model import ACTIVE, FINAL, OUTPUT_FILE, Checkpoint, Job, JobEvent, JobState
from gym_serve.jobs.runner import JobRunner
from gym_serve.logs import audit
from gym_serve.settings import JobSettings

logger: logging.Logger = logging.getLogger(__name__)

_PAGE_OF_EVENTS = 500
_KEEPALIVE_S = 15.0
_LOG_CHUNK_BYTES = 256 * 1024
_LOG_POLL_S = 0.25
_MAX_LABELS = 64
_MAX_LABEL_CHARS = 512


class JobService:
    """The calls on jobs. A key sees its own jobs; an admin's key sees all."""

    def __init__(
        self,
        *,
        database: Database,
        files: FileService,
        models: ModelLookup,
        runner: JobRunner,
        changes: Changes,
        settings: JobSettings,
        num_gpus: int,
        jobs_dir: Path,
        own_url: Callable[[], str] = lambda: "",
    ) -> None:
        """`own_url` is the daemon's HTTP address, for jobs whose model answers there."""
        self._own_url = own_url
        self._database = database
        self._files = files
        self._models = models
        self._runner = runner
        self._changes = changes
        self._settings = settings
        self._num_gpus = num_gpus
        self._jobs_dir = jobs_dir

    async def create(
        self,
        key: Key,
        spec_json: str,
        *,
        request_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        num_gpus: int | None = None,
        max_attempts: int | None = None,
        origin: dict[str, object] | None = None,
        validate_only: bool = False,
    ) -> Job:
        """Checks a specification and puts it into the queue. The same `request_id` gives the same job.
        With `validate_only`, nothing is queued and the answer has no id.

        `num_gpus` is one when there are any, and the specification trains weights and does not ask for the CPU.
        Raises `SpecError` with the command's own messages, and `ServiceError` for quotas and request ids.
        """
        spec = parse_spec(spec_json)
        digest = sha256(spec)
        if request_id is not None:
            known = await self._database.read(lambda connection: store.by_request(connection, key.id, request_id))
            if known is not None:
                return _same(known, digest, request_id)
        self._check_trainer()
        labels = dict(labels or {})
        _check_labels(labels)
        needed = self._needed_gpus(spec, num_gpus)
        if max_attempts is not None and not 1 <= max_attempts <= 100:
            raise invalid("max_attempts must be from 1 to 100", field="max_attempts")
        max_queued = key.quota.max_queued_jobs
        if max_queued is None:
            max_queued = self._settings.max_queued_per_key
        admitted = admit(spec, self._models, self._settings)
        files = {file_id: await self._files.file(key, file_id) for file_id in dict.fromkeys(admitted.file_ids)}
        check_rows(spec, {file_id: file.format for file_id, file in files.items()})
        now = time.time()
        job = Job(
            id="" if validate_only else f"job-{secrets.token_hex(12)}",
            owner=key.id,
            name=spec.name,
            spec_json=canonical_json(spec),
            spec_sha256=digest,
            labels=labels,
            origin=origin or {},
            num_gpus=needed,
            max_attempts=max_attempts or self._settings.max_attempts,
            state=JobState.QUEUED,
            message="",
            failure=None,
            progress=b"",
            created_at=now,
            queued_at=now,
            started_at=None,
            finished_at=None,
            attempt=0,
            not_before=now,
            run_dir=None,
            run_cursor=0,
            last_sequence=0,
            model_id=None,
        )
        if validate_only:
            return job
        folder = self._jobs_dir / job.id

        def write_folder() -> None:
            (folder / "runs").mkdir(parents=True)
            placed = place_files(
                admitted.spec,
                lambda file_id: str(self._files.link(files[file_id], folder / "data")),
                str(folder / "runs"),
                own_url=self._own_url(),
            )
            (folder / "spec.json").write_text(canonical_json(placed), encoding="utf-8")

        def transaction(connection: sqlite3.Connection) -> Job:
            if request_id is not None and (known := store.by_request(connection, key.id, request_id)) is not None:
                return _same(known, digest, request_id)
            if store.count_queued(connection, key.id) >= max_queued:
                raise ServiceError(
                    Reason.QUOTA_EXCEEDED,
                    f"{max_queued} jobs of this key wait already, as many as it may have",
                    hint="wait for one of them to start, or cancel one",
                )
            return store.insert(connection, job, request_id, files)

        try:
            await asyncio.to_thread(write_folder)
            accepted = await self._database.write(transaction)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise
        if accepted.id != job.id:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        logger.info("job %s: accepted from %s", accepted.id, key.name)
        self._runner.wake()
        return accepted

    async def get(self, key: Key, job_id: str) -> Job:
        """A job that this key may see."""
        job = await self._database.read(lambda connection: store.get(connection, job_id))
        if not key.may_see(job.owner):
            raise not_found(Reason.JOB_NOT_FOUND, job_id)
        return job

    async def list(
        self,
        key: Key,
        *,
        states: Sequence[JobState] = (),
        labels: dict[str, str] | None = None,
        after: str | None = None,
        limit: int,
        everyone: bool = False,
    ) -> list[Job]:
        """A page of jobs, newest first. `everyone` is for admins."""
        if after is not None:
            await self.get(key, after)
        if everyone:
            require_admin(key)
            audit.info("jobs of all keys listed", extra={"by": key.name})
        owner = None if everyone else key.id
        return await self._database.read(
            lambda connection: store.page(
                connection, owner=owner, states=states, labels=labels, after=after, limit=limit
            )
        )

    async def cancel(self, key: Key, job_id: str) -> Job:
        """Ends a job for good; its last checkpoint is kept. Cancelling a cancelled job changes nothing."""
        return await self._stop(key, job_id, JobState.CANCELLING, JobState.CANCELLED)

    async def pause(self, key: Key, job_id: str) -> Job:
        """Stops a job so that `resume` can take it up from its last checkpoint."""
        return await self._stop(key, job_id, JobState.PAUSING, JobState.PAUSED)

    async def resume(self, key: Key, job_id: str) -> Job:
        """Puts a paused, failed or cancelled job back into the queue; it goes on from its last checkpoint."""
        await self._to_change(key, job_id, "resumed")

        def transaction(connection: sqlite3.Connection) -> Job:
            job = store.get(connection, job_id)
            if job.state is JobState.QUEUED:
                return job
            if job.state not in _RESUMABLE:
                raise ServiceError(
                    Reason.WRONG_STATE,
                    f"job '{job_id}' is {job.state}; only a paused, failed or cancelled one can be resumed",
                )
            # The attempts so far were ended on purpose or by an error: the policy counts anew.
            connection.execute(
                "UPDATE jobs SET max_attempts = attempt + ? WHERE id = ?", (self._settings.max_attempts, job_id)
            )
            return store.move(connection, job_id, JobState.QUEUED, not_before=time.time())

        job = await self._database.write(transaction)
        self._changes.notify(job_id)
        self._runner.wake()
        return job

    async def delete(self, key: Key, job_id: str) -> None:
        """Removes a job that does not run, with its run directory. Its model stays."""
        await self._to_change(key, job_id, "deleted")

        def transaction(connection: sqlite3.Connection) -> None:
            job = store.get(connection, job_id)
            if job.state in ACTIVE:
                raise ServiceError(Reason.WRONG_STATE, f"job '{job_id}' is {job.state}", hint="cancel it first")
            store.delete(connection, job_id)

        await self._database.write(transaction)
        await asyncio.to_thread(shutil.rmtree, self._jobs_dir / job_id, ignore_errors=True)
        self._changes.notify(job_id)

    async def events(self, key: Key, job_id: str, *, after: int, limit: int) -> list[JobEvent]:
        """A page of a job's events."""
        await self.get(key, job_id)
        return await self._database.read(lambda connection: store.events(connection, job_id, after=after, limit=limit))

    async def latest_events(self, key: Key, job_id: str, *, before: int | None, limit: int) -> list[JobEvent]:
        """A page of a job's events, the newest first."""
        await self.get(key, job_id)
        return await self._database.read(
            lambda connection: store.latest_events(connection, job_id, before=before, limit=limit)
        )

    async def checkpoints(self, key: Key, job_id: str) -> list[Checkpoint]:
        """The checkpoints of a job, the latest first."""
        await self.get(key, job_id)
        return await self._database.read(lambda connection: store.checkpoints(connection, job_id))

    async def queue_position(self, job: Job) -> int:
        """How many jobs have waited for longer."""
        return await self._database.read(lambda connection: store.queue_position(connection, job))

    async def follow(self, key: Key, job_id: str, *, after: int) -> AsyncIterator[Sequence[JobEvent]]:
        """Batches of a job's events from `after`, each as it comes, until the job is in a final state.

        An empty batch now and then says that the daemon is still there. Each reader has its own place and reads at
        its own speed: nothing is kept for a slow one.
        """
        await self.get(key, job_id)
        while True:
            ticket = self._changes.ticket(job_id)
            at = after

            def look(connection: sqlite3.Connection, at: int = at) -> tuple[list[JobEvent], Job]:
                job = store.get(connection, job_id)
                return store.events(connection, job_id, after=at, limit=_PAGE_OF_EVENTS), job

            batch, job = await self._database.read(look)
            if batch:
                after = batch[-1].sequence
                yield batch
            if after >= job.last_sequence:
                if job.state in FINAL:
                    return
                timed_out = await self._changes.wait(ticket, _KEEPALIVE_S)
                if timed_out:
                    yield ()

    async def follow_output(
        self, key: Key, job_id: str, *, offset: int, follow: bool
    ) -> AsyncIterator[tuple[str, int]]:
        """What the job's processes print from a byte on, in whole lines, each with the byte behind it. With `follow`,
        goes on until the job is in a final state; the end of the log is not the end of the job."""
        path = self._jobs_dir / job_id / OUTPUT_FILE
        await self.get(key, job_id)
        while True:
            # The state is looked up before the log: what was printed until the end is in it.
            ended = not follow or (await self.get(key, job_id)).state in FINAL
            data = await asyncio.to_thread(_read, path, offset)
            complete = data if ended and len(data) < _LOG_CHUNK_BYTES else data[: data.rfind(b"\n") + 1]
            if complete:
                offset += len(complete)
                yield complete.decode("utf-8", "replace"), offset
            elif ended:
                return
            else:
                await asyncio.sleep(_LOG_POLL_S)

    async def _to_change(self, key: Key, job_id: str, change: str) -> None:
        """Checks that this key may change a job, and writes down where that is another key's."""
        job = await self.get(key, job_id)
        if job.owner != key.id:
            audit.info("job of another key: %s", change, extra={"by": key.name, "job": job_id, "owner": job.owner})

    async def _stop(self, key: Key, job_id: str, stopping: JobState, stopped: JobState) -> Job:
        await self._to_change(key, job_id, stopping.value)

        def transaction(connection: sqlite3.Connection) -> Job:
            job = store.get(connection, job_id)
            if job.state in (stopping, stopped) or job.state is JobState.CANCELLING:
                return job
            if job.state in FINAL:
                raise ServiceError(Reason.WRONG_STATE, f"job '{job_id}' has {_ENDED[job.state]} already")
            return store.move(connection, job_id, stopping if job.state in ACTIVE else stopped)

        job = await self._database.write(transaction)
        self._changes.notify(job_id)
        if job.state in ACTIVE:
            await self._runner.stop(job_id)
        self._runner.wake()
        return job

    def _needed_gpus(self, spec: RunSpec, asked: int | None) -> int:
        if asked is None:
            computes = spec.method.kind != "training_free_grpo" and spec.performance.device != "cpu"
            return min(1, self._num_gpus) if computes else 0
        if not 0 <= asked <= self._num_gpus:
            raise invalid(f"{asked} GPUs were asked for; this daemon has {self._num_gpus} for jobs", field="num_gpus")
        return asked

    @property
    def can_train(self) -> bool:
        """Whether the trainer is installed beside the daemon, or named in its settings."""
        return bool(self._settings.command) or importlib.util.find_spec("gym_trainer") is not None

    def _check_trainer(self) -> None:
        if not self.can_train:
            raise ServiceError(
                Reason.NOT_INSTALLED,
                "this daemon serves models, but the trainer is not installed beside it",
                hint='on its machine: pip install "gym-trainer[torch]", or set jobs.command to a gym elsewhere',
            )


_RESUMABLE = {JobState.PAUSED, JobState.FAILED, JobState.CANCELLED}
_ENDED = {JobState.SUCCEEDED: "succeeded", JobState.FAILED: "failed", JobState.CANCELLED: "been cancelled"}


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_LOG_CHUNK_BYTES)
    except FileNotFoundError:
        return b""


def _same(known: Job, digest: str, request_id: str) -> Job:
    if known.spec_sha256 != digest:
        raise ServiceError(
            Reason.REQUEST_ID_REUSED,
            f"request id '{request_id}' was used for another specification before",
            hint="use a new request id for each job",
        )
    return known


def _check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > _MAX_LABELS or any(not 1 <= len(name) <= 64 for name in labels):
        raise invalid(f"at most {_MAX_LABELS} labels, each name of 1 to 64 characters", field="labels")
    if len(json.dumps(labels)) > _MAX_LABELS * _MAX_LABEL_CHARS or any(
        len(value) > _MAX_LABEL_CHARS for value in labels.values()
    ):
        raise invalid(f"a label's value has at most {_MAX_LABEL_CHARS} characters", field="labels")
