"""Starts waiting jobs, follows the running ones, and writes down how they end. One per daemon.

Nothing here is only in memory: what runs is in the database with the processes' identity, so a daemon that was
killed finds its jobs again (`recover`), and each step can be done twice without harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gym_sdk.errors import GymError
from gym_serve._changes import Changes
from gym_serve._database import Database
from gym_serve.auth import list_keys
from gym_serve.jobs import store
from gym_serve.jobs.admission import asks_an_endpoint
from gym_serve.jobs.environment import job_environment
from gym_serve.jobs.model import FINAL, OUTPUT_FILE, Attempt, Failure, Job, JobState
from gym_serve.jobs.queue import Capacity, Running, choose
from gym_serve.jobs.runlog import RunLog
from gym_serve.launchers.base import Launch, Launcher, Outcome
from gym_serve.metrics import Metrics
from gym_serve.settings import JobSettings

logger: logging.Logger = logging.getLogger(__name__)

_NO_MODEL = "what it made can be downloaded; it is none of the models that are served here"
_POLL_S = 0.25
"""How often a run's event log and end are looked at."""
_TAIL_BYTES = 4096
_TAIL_LINES = 12


class JobRunner:
    """The loop between the queue and the launcher."""

    def __init__(
        self,
        *,
        database: Database,
        launcher: Launcher,
        settings: JobSettings,
        num_gpus: int,
        jobs_dir: Path,
        changes: Changes,
        register_model: Callable[[Job, Path], Awaitable[str | None]],
        on_gpus_held: Callable[[frozenset[int]], Awaitable[None]] | None = None,
        job_key: Callable[[str], str] | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """`register_model(job, run_dir)` makes the result servable and returns its id, or None for a result that is
        none of the daemon's models. It may be called again for the same job, and must then give the same id.
        `on_gpus_held` is told which GPUs jobs hold: before a job starts on them, and after it has ended.
        `job_key(job id)` is the key by which a job whose model answers at an endpoint may call this daemon."""
        self._database = database
        self._launcher = launcher
        self._settings = settings
        self._capacity = Capacity(
            num_gpus=num_gpus,
            max_cpu_jobs=settings.max_cpu_jobs,
            max_running_per_key=settings.max_running_per_key,
            overtake_s=settings.overtake_s,
        )
        self._jobs_dir = jobs_dir
        self._changes = changes
        self._register_model = register_model
        self._on_gpus_held = on_gpus_held
        self._job_key = job_key
        self._metrics = metrics
        self.num_queued: int = 0
        self._last_started: dict[str, float] = {}
        self._running: dict[str, Running] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    async def recover(self) -> None:
        """Takes up what an earlier daemon left, then begins to start jobs."""
        for attempt in await self._database.read(store.open_attempts):
            job = await self._database.read(lambda connection, attempt=attempt: store.get(connection, attempt.job_id))
            logger.info("job %s: found again, attempt %d, %s", job.id, attempt.number, job.state)
            if job.state in (JobState.CANCELLING, JobState.PAUSING):
                await asyncio.to_thread(self._launcher.stop, attempt.process)
            self._follow(job, attempt)
        await self._tell_gpus()
        self._loop = asyncio.create_task(self._schedule_forever(), name="job-queue")

    async def close(self) -> None:
        """Stops looking. The jobs go on."""
        tasks = [*self._followers.values(), *([self._loop] if self._loop else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        """The queue has changed."""
        self._wake.set()

    @property
    def num_running(self) -> int:
        """Jobs with processes."""
        return len(self._running)

    @property
    def num_gpus_held(self) -> int:
        """GPUs that running jobs hold."""
        return sum(len(one.gpus) for one in self._running.values())

    async def _tell_gpus(self, more: Sequence[int] = ()) -> None:
        if self._on_gpus_held is not None:
            held = {gpu for one in self._running.values() for gpu in one.gpus}
            await self._on_gpus_held(frozenset(held.union(more)))

    async def stop(self, job_id: str) -> None:
        """Has a job's processes end; the follower writes down the end."""
        attempts = await self._database.read(lambda connection: store.attempts(connection, job_id))
        if attempts and attempts[-1].ended_at is None:
            await asyncio.to_thread(self._launcher.stop, attempts[-1].process)

    async def _schedule_forever(self) -> None:
        while True:
            try:
                await self._schedule()
            except Exception:
                logger.exception("the job queue failed; it goes on")
            with contextlib.suppress(TimeoutError):
                # Not `wait_for`: before Python 3.12 it loses a cancellation that comes with the result.
                async with asyncio.timeout(1.0):
                    await self._wake.wait()
            self._wake.clear()

    async def _schedule(self) -> None:
        queued, keys = await self._database.read(
            lambda connection: (store.in_states(connection, [JobState.QUEUED]), list_keys(connection))
        )
        self.num_queued = len(queued)
        chosen = choose(
            queued,
            list(self._running.values()),
            self._last_started,
            self._capacity,
            time.time(),
            {key.id: key.quota.max_running_jobs for key in keys if key.quota.max_running_jobs is not None},
        )
        for job, gpus in chosen:
            await self._start(job, gpus)

    async def _start(self, job: Job, gpus: list[int]) -> None:
        number = job.attempt + 1
        directory = self._jobs_dir / job.id / f"attempt-{number}"
        # What a start that was never recorded left must not be taken for this one's end.
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

        def record(process: dict[str, object]) -> None:
            def transaction(connection: sqlite3.Connection) -> None:
                if store.get(connection, job.id).state is not JobState.QUEUED:
                    raise _NotQueued
                store.begin_attempt(connection, job.id, str(directory), gpus, process)

            self._database.write_now(transaction)

        environment = job_environment(os.environ, self._settings.environment, gpus)
        if self._job_key is not None and asks_an_endpoint(job):
            environment.setdefault("GYM_API_KEY", self._job_key(job.id))
        launch = Launch(
            command=self._command(job),
            directory=directory,
            output=self._jobs_dir / job.id / OUTPUT_FILE,
            working_directory=self._jobs_dir / job.id,
            environment=environment,
            token=secrets.token_hex(16),
            grace_s=self._settings.cancel_grace_s,
            num_gpus=len(gpus),
        )
        try:
            await self._tell_gpus(gpus)
            await asyncio.to_thread(self._launcher.start, launch, record)
        except _NotQueued:
            await self._tell_gpus()
            return  # cancelled or deleted between the choice and the start
        except (OSError, GymError) as error:
            logger.error("job %s: could not be started: %s", job.id, error)
            failure = Failure(message=f"could not be started: {error}")
            await self._database.write(
                lambda connection: store.move(
                    connection, job.id, JobState.FAILED, message=failure.message, failure=failure
                )
            )
            self._changes.notify(job.id)
            await self._tell_gpus()
            return
        self._last_started[job.owner] = time.time()
        job, attempts = await self._database.read(
            lambda connection: (store.get(connection, job.id), store.attempts(connection, job.id))
        )
        logger.info("job %s: attempt %d started on %s", job.id, number, f"GPU {gpus}" if gpus else "no GPU")
        self._changes.notify(job.id)
        self._follow(job, attempts[-1])

    def _command(self, job: Job) -> list[str]:
        gym = self._settings.command or [sys.executable, "-c", "from gym_sdk.cli import main; main()"]
        if job.run_dir is not None and Path(job.run_dir, "spec.yaml").exists():
            return [*gym, "train", "--resume", job.run_dir]
        return [*gym, "train", str(self._jobs_dir / job.id / "spec.json")]

    def _follow(self, job: Job, attempt: Attempt) -> None:
        self._running[job.id] = Running(owner=job.owner, gpus=attempt.gpus)
        task = asyncio.create_task(self._follow_to_end(job, attempt), name=f"job-{job.id}")
        self._followers[job.id] = task

    async def _follow_to_end(self, job: Job, attempt: Attempt) -> None:
        directory = Path(attempt.directory)
        run_dir = Path(job.run_dir) if job.run_dir else None
        log = RunLog(run_dir / "events.jsonl") if run_dir else None
        while True:
            try:
                alive = await asyncio.to_thread(self._launcher.is_alive, attempt.process)
                # Looked for after `alive`, and `alive` before the log: nothing that was written is missed.
                outcome = self._launcher.outcome(directory) or (None if alive else Outcome(exit_code=None, lost=True))
                if run_dir is None and (run_dir := _newest_run(self._jobs_dir / job.id / "runs")) is not None:
                    found = str(run_dir)
                    await self._database.write(
                        lambda connection, found=found: store.set_run_dir(connection, job.id, found)
                    )
                    log = RunLog(run_dir / "events.jsonl")
                while log is not None and (events := await asyncio.to_thread(log.read)):
                    await self._database.write(
                        lambda connection, events=events: store.append_run_events(connection, job.id, events)
                    )
                    self._changes.notify(job.id)
                if outcome is not None:
                    await self._finish(job.id, attempt, outcome, run_dir)
                    break
            except Exception:
                logger.exception("job %s: following it failed; it is tried again", job.id)
            await asyncio.sleep(_POLL_S)
        del self._running[job.id]
        del self._followers[job.id]
        await self._tell_gpus()
        self.wake()

    async def _finish(self, job_id: str, attempt: Attempt, outcome: Outcome, run_dir: Path | None) -> None:
        """Ends the attempt and puts the job into the state that follows. Done again after a crash, it does the same."""
        if outcome.lost:
            await asyncio.to_thread(self._launcher.sweep, attempt.process)
        job = await self._database.read(lambda connection: store.get(connection, job_id))
        model_id: str | None = None
        registered = False
        failure = Failure(
            message=outcome.describe(),
            exit_code=-outcome.signal if outcome.signal is not None else outcome.exit_code,
            log_lines=await asyncio.to_thread(_last_lines, self._jobs_dir / job_id / OUTPUT_FILE),
        )
        if outcome.succeeded and not outcome.stopped:
            if run_dir is None:
                failure = replace(failure, message="the run ended with exit code 0 but left no run directory")
            else:
                try:
                    model_id = await self._register_model(job, run_dir)
                    registered = True
                except GymError as error:
                    message = f"the run succeeded, but its model cannot be served: {error.message}"
                    failure = replace(failure, message=message, hint=error.hint or "")

        def transaction(connection: sqlite3.Connection) -> Job:
            job = store.get(connection, job_id)
            store.end_attempt(connection, job_id, outcome.describe())
            if registered:
                message = "" if model_id else _NO_MODEL
                return store.move(connection, job_id, JobState.SUCCEEDED, message=message, model_id=model_id)
            if job.state is JobState.CANCELLING:
                return store.move(connection, job_id, JobState.CANCELLED)
            if job.state is JobState.PAUSING:
                return store.move(connection, job_id, JobState.PAUSED)
            if outcome.interrupted and job.attempt < job.max_attempts:
                delay_s = self._settings.retry_delay_s * 2 ** (job.attempt - 1)
                message = f"attempt {job.attempt}: {outcome.describe()}; goes on from the last checkpoint"
                return store.move(
                    connection, job_id, JobState.QUEUED, message=message, not_before=time.time() + delay_s
                )
            return store.move(connection, job_id, JobState.FAILED, message=failure.message, failure=failure)

        job = await self._database.write(transaction)
        logger.info("job %s: %s (%s)", job_id, job.state, outcome.describe())
        self._changes.notify(job_id)
        if self._metrics is not None and job.state in FINAL:
            self._metrics.job_ends.labels(job.state.value).inc()


class _NotQueued(Exception):
    """The job left the queue before it could be started."""


def _newest_run(parent: Path) -> Path | None:
    """The run directory below a job's folder: one that has an event log. The newest, if a start left more than one."""
    runs = [path for path in parent.glob("*/events.jsonl") if path.is_file()]
    return max(runs, key=lambda path: path.stat().st_ctime).parent if runs else None


def _last_lines(path: Path) -> tuple[str, ...]:
    """The end of a job's output."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ()
    return tuple(line for line in lines[-_TAIL_LINES:] if line.strip())
