"""Guards the life of a job with real processes: start, events, cancel with every descendant, retry, recovery."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gym_sdk._proto.gym.v1.events_pb2 import RUN_STATE_SUCCEEDED, RunEvent
from gym_sdk._proto.gym.v1.jobs_pb2 import JobProgress
from gym_sdk.errors import ModelError, SpecError
from gym_serve._changes import Changes
from gym_serve._database import Database
from gym_serve.auth import Key, Scope
from gym_serve.errors import Reason, ServiceError
from gym_serve.files.blobs import BlobStore
from gym_serve.files.service import FileService
from gym_serve.jobs.model import FINAL, Failure, Job, JobEvent, JobState
from gym_serve.jobs.runner import JobRunner
from gym_serve.jobs.service import JobService
from gym_serve.launchers.local import LocalLauncher
from gym_serve.settings import FileSettings, JobSettings, LimitSettings

STAND_IN = Path(__file__).with_name("stand_in_trainer.py")
ANN = Key(id="key-ann", name="ann", scope=Scope.USER)
BEN = Key(id="key-ben", name="ben", scope=Scope.USER)
ROOT = Key(id="key-root", name="root", scope=Scope.ADMIN)


class Daemon:
    """The job side of a daemon over a data directory."""

    def __init__(self, folder: Path, *, num_gpus: int = 0, **settings: object) -> None:
        folder.mkdir(exist_ok=True)
        self.registered: list[str] = []
        self.reject = False
        job_settings = JobSettings.model_validate(
            {"command": [sys.executable, str(STAND_IN)], "retry_delay_s": 0.0, "cancel_grace_s": 0.5, **settings}
        )
        self.database = Database(folder / "gym.db")
        changes = Changes()
        blobs = BlobStore(folder)
        self.files = FileService(self.database, blobs, LimitSettings(), FileSettings())
        self.launcher = LocalLauncher()
        self.runner = JobRunner(
            database=self.database,
            launcher=self.launcher,
            settings=job_settings,
            num_gpus=num_gpus,
            jobs_dir=folder / "jobs",
            changes=changes,
            register_model=self.register,
        )
        self.jobs = JobService(
            database=self.database,
            files=self.files,
            models=self,
            runner=self.runner,
            changes=changes,
            settings=job_settings,
            num_gpus=num_gpus,
            jobs_dir=folder / "jobs",
        )

    async def register(self, job: Job, run_dir: Path) -> str:
        if self.reject:
            raise ModelError("the adapter matches no module")
        self.registered.append(job.id)
        return f"model-of-{job.id}"

    def base_source(self, model_id: str) -> str | None:
        return "/models/base" if model_id == "base" else None

    def adapter_folder(self, model_id: str) -> str | None:
        return None

    def experiences_folder(self, model_id: str) -> str | None:
        return None

    async def __aenter__(self) -> Daemon:
        await self.runner.recover()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.close()
        self.database.close()

    async def submit(self, name: str, key: Key = ANN, **options: object) -> Job:
        return await self.jobs.create(key, await self.spec(name, key), **options)  # type: ignore[arg-type]

    async def spec(self, name: str, key: Key = ANN) -> str:
        async def rows():
            yield b'{"messages": []}\n'

        file = await self.files.uploads.create(key, filename="rows.jsonl", purpose="user_data", data=rows())
        return json.dumps(
            {"name": name, "model": {"source": "base"}, "data": {"train": [{"source": f"file:{file.id}"}]}}
        )

    async def until(self, job: Job, *states: JobState, key: Key = ROOT) -> Job:
        """Follows the job until one of its events says one of these states."""
        async for batch in self.jobs.follow(key, job.id, after=0):
            if any(event.state in states for event in batch):
                return await self.jobs.get(key, job.id)
        return await self.jobs.get(key, job.id)

    async def until_step(self, job: Job, number: int = 1) -> None:
        async for batch in self.jobs.follow(ROOT, job.id, after=0):
            if any(event.run and RunEvent.FromString(event.run).metric.step >= number for event in batch):
                return

    async def history(self, job: Job) -> list[JobEvent]:
        return await self.jobs.events(ROOT, job.id, after=0, limit=100_000)

    async def run_dir(self, job: Job) -> Path:
        job = await self.jobs.get(ROOT, job.id)
        assert job.run_dir is not None
        return Path(job.run_dir)


def scenario(function: Callable[[Path], Awaitable[None]]) -> Callable[[Path], None]:
    """A test that is a coroutine, with a time limit of its own."""

    def run(tmp_path: Path) -> None:
        asyncio.run(asyncio.wait_for(function(tmp_path / "data"), 60))

    run.__name__ = function.__name__
    run.__doc__ = function.__doc__
    return run


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def workers_of(folder: Path, count: int) -> list[int]:
    """The process ids that the stand-in's workers wrote down, once there are so many."""
    while True:
        for path in folder.glob("workers"):
            pids = [int(line) for line in path.read_text().split()]
            if len(pids) >= count:
                return pids
        await asyncio.sleep(0.01)


def states(history: list[JobEvent]) -> list[JobState]:
    return [event.state for event in history if event.state is not None]


@scenario
async def test_a_job_runs_to_its_end_and_its_events_are_numbered_without_gaps(data: Path) -> None:
    async with Daemon(data) as daemon:
        job = await daemon.submit("steps-5")
        assert job.state is JobState.QUEUED
        job = await daemon.until(job, *FINAL)
        assert (job.state, job.model_id, job.attempt) == (JobState.SUCCEEDED, f"model-of-{job.id}", 1)
        history = await daemon.history(job)
        assert [event.sequence for event in history] == list(range(1, len(history) + 1))
        assert states(history) == [JobState.QUEUED, JobState.STARTING, JobState.RUNNING, JobState.SUCCEEDED]
        progress = JobProgress.FromString(job.progress)
        assert (progress.run_state, progress.step) == (RUN_STATE_SUCCEEDED, 5)
        assert progress.metrics["loss"].number == 0.2
        run_events = [RunEvent.FromString(event.run) for event in history if event.run]
        assert [event.metric.step for event in run_events if event.HasField("metric")] == [1, 2, 3, 4, 5]
        assert [event.sequence for event in run_events] == list(range(1, len(run_events) + 1))
        assert history[-1].state is JobState.SUCCEEDED


@scenario
async def test_the_trainer_sees_only_the_environment_that_it_needs(data: Path) -> None:
    os.environ["GYM_TEST_SECRET"] = "must-not-travel"
    os.environ["GYM_TEST_ALLOWED"] = "may-travel"
    try:
        async with Daemon(data, environment=["GYM_TEST_ALLOWED"]) as daemon:
            job = await daemon.until(await daemon.submit("steps-1"), *FINAL)
            environment = json.loads((await daemon.run_dir(job) / "environment.json").read_text())
    finally:
        del os.environ["GYM_TEST_SECRET"], os.environ["GYM_TEST_ALLOWED"]
    assert environment["GYM_TEST_ALLOWED"] == "may-travel"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "must-not-travel" not in environment.values()


@pytest.mark.parametrize("name", ["workers", "stubborn"])
def test_cancel_ends_every_process_of_a_job(tmp_path: Path, name: str) -> None:
    async def run() -> None:
        async with Daemon(tmp_path) as daemon:
            job = await daemon.submit(name)
            await daemon.until_step(job)
            folder = await daemon.run_dir(job)
            pids = await workers_of(folder, 2)
            assert all(is_running(pid) for pid in pids)
            assert len({os.getsid(pid) for pid in pids}) == 2, "each worker leads a session of its own"
            assert (await daemon.jobs.cancel(ANN, job.id)).state is JobState.CANCELLING
            job = await daemon.until(job, JobState.CANCELLED)
            assert job.state is JobState.CANCELLED
            assert not any(is_running(pid) for pid in pids)
            assert (folder / "checkpoints" / "checkpoint-1").is_dir(), "the last checkpoint is kept"
            assert (await daemon.jobs.cancel(ANN, job.id)).state is JobState.CANCELLED, "again changes nothing"

    asyncio.run(asyncio.wait_for(run(), 60))


@scenario
async def test_a_job_survives_its_daemon_and_is_found_again(data: Path) -> None:
    first = Daemon(data)
    await first.runner.recover()
    running = await first.submit("waits")
    queued = await first.submit("steps-2", BEN)
    await first.until_step(running)
    seen = await first.history(running)
    await first.runner.close()  # the daemon is gone; nobody watches
    first.database.close()
    async with Daemon(data) as second:
        job = await second.jobs.get(ANN, running.id)
        assert (job.state, job.attempt) == (JobState.RUNNING, 1)
        (await second.run_dir(job) / "go").touch()
        job = await second.until(job, *FINAL)
        assert (job.state, job.attempt) == (JobState.SUCCEEDED, 1)
        history = await second.history(job)
        assert history[: len(seen)] == seen, "a reader's cursor still stands where it stood"
        assert [event.sequence for event in history] == list(range(1, len(history) + 1))
        steps = [e.metric.step for e in (RunEvent.FromString(h.run) for h in history if h.run) if e.HasField("metric")]
        assert steps == list(range(1, len(steps) + 1)), "no event is lost or doubled"
        assert (await second.until(queued, *FINAL)).state is JobState.SUCCEEDED


@scenario
async def test_what_ends_while_no_daemon_runs_is_known_afterwards(data: Path) -> None:
    first = Daemon(data)
    await first.runner.recover()
    job = await first.submit("waits")
    await first.until_step(job)
    folder = await first.run_dir(job)
    await first.runner.close()
    first.database.close()
    (folder / "go").touch()
    attempt = data / "jobs" / job.id / "attempt-1"
    while not (attempt / "exit.json").exists():
        await asyncio.sleep(0.01)
    async with Daemon(data) as second:
        job = await second.until(job, *FINAL)
        assert job.state is JobState.SUCCEEDED
        assert second.registered == [job.id]


@scenario
async def test_a_killed_supervisor_takes_its_job_with_it_and_the_job_goes_on_from_its_checkpoint(data: Path) -> None:
    async with Daemon(data, max_attempts=2) as daemon:
        job = await daemon.submit("workers")
        await daemon.until_step(job)
        pids = await workers_of(await daemon.run_dir(job), 2)
        supervisor = daemon.launcher._started
        (pid,) = supervisor
        os.kill(pid, signal.SIGKILL)
        async for batch in daemon.jobs.follow(ANN, job.id, after=0):
            if any(event.state is JobState.RUNNING and event.attempt == 2 for event in batch):
                break
        assert not any(is_running(pid) for pid in pids)
        queued = [event for event in await daemon.history(job) if event.state is JobState.QUEUED]
        assert queued[-1].message == "attempt 1: its processes were gone; goes on from the last checkpoint"
        await daemon.jobs.cancel(ANN, job.id)
        await daemon.until(job, JobState.CANCELLED)


@scenario
async def test_a_job_killed_from_outside_is_resumed(data: Path) -> None:
    async with Daemon(data) as daemon:
        job = await daemon.until(await daemon.submit("dies-once"), *FINAL)
        assert (job.state, job.attempt) == (JobState.SUCCEEDED, 2)
        history = await daemon.history(job)
        steps = [e.metric.step for e in (RunEvent.FromString(h.run) for h in history if h.run) if e.HasField("metric")]
        assert steps == [1, 2, 3, 4]
        assert {event.attempt for event in history} == {0, 1, 2}


@scenario
async def test_a_machine_that_went_down_resumes_its_jobs(data: Path) -> None:
    async with Daemon(data) as daemon:
        job = await daemon.submit("waits")
        await daemon.until_step(job)
        folder = await daemon.run_dir(job)
        attempt = await daemon.database.read(lambda c: c.execute("SELECT process_json FROM attempts").fetchone()[0])
    process = json.loads(attempt)
    LocalLauncher().sweep(process)
    process["boot_id"] = "another boot"
    process["pid"] = os.getpid()  # the id is used again, by something that must not be touched
    database = Database(data / "gym.db")
    await database.write(lambda c: c.execute("UPDATE attempts SET process_json = ?", (json.dumps(process),)))
    database.close()
    (folder / "go").touch()
    async with Daemon(data) as daemon:
        job = await daemon.until(job, *FINAL)
        assert (job.state, job.attempt) == (JobState.SUCCEEDED, 2)


@pytest.mark.parametrize(
    ("name", "exit_code", "line"),
    [
        ("fails", 1, "error: the loss was not a number at step 1"),
        ("mistaken", 2, "error: rank is larger than the layer"),
    ],
)
def test_an_error_of_the_job_is_told_with_its_last_lines_and_not_tried_again(
    tmp_path: Path, name: str, exit_code: int, line: str
) -> None:
    async def run() -> None:
        async with Daemon(tmp_path) as daemon:
            job = await daemon.until(await daemon.submit(name), *FINAL)
            assert (job.state, job.attempt) == (JobState.FAILED, 1)
            message = f"ended with exit code {exit_code}"
            assert job.failure == Failure(message=message, exit_code=exit_code, log_lines=(line,))
            assert job.message == message

    asyncio.run(asyncio.wait_for(run(), 60))


@scenario
async def test_a_model_that_cannot_be_served_fails_the_job(data: Path) -> None:
    async with Daemon(data) as daemon:
        daemon.reject = True
        job = await daemon.until(await daemon.submit("steps-1"), *FINAL)
        assert job.state is JobState.FAILED
        assert "the adapter matches no module" in job.message


@scenario
async def test_pause_and_resume_go_on_from_the_checkpoint(data: Path) -> None:
    async with Daemon(data) as daemon:
        job = await daemon.submit("waits")
        await daemon.until_step(job, 3)
        await daemon.jobs.pause(ANN, job.id)
        job = await daemon.until(job, JobState.PAUSED)
        assert job.state is JobState.PAUSED
        reached = len(list((await daemon.run_dir(job) / "checkpoints").iterdir()))
        (await daemon.run_dir(job) / "go").touch()
        await daemon.jobs.resume(ANN, job.id)
        job = await daemon.until(job, *FINAL)
        assert job.state is JobState.SUCCEEDED
        assert states(await daemon.history(job)) == [
            *(JobState.QUEUED, JobState.STARTING, JobState.RUNNING, JobState.PAUSING, JobState.PAUSED),
            *(JobState.QUEUED, JobState.STARTING, JobState.RUNNING, JobState.SUCCEEDED),
        ]
        assert len(list((await daemon.run_dir(job) / "checkpoints").iterdir())) == reached


@scenario
async def test_cancelling_a_waiting_job_starts_nothing(data: Path) -> None:
    async with Daemon(data) as daemon:
        first = await daemon.submit("waits")
        second = await daemon.submit("steps-1")
        await daemon.until(first, JobState.RUNNING)
        assert (await daemon.jobs.cancel(ANN, second.id)).state is JobState.CANCELLED
        (await wait_for_run(daemon, first) / "go").touch()
        await daemon.until(first, *FINAL)
        assert (await daemon.jobs.get(ANN, second.id)).attempt == 0


async def wait_for_run(daemon: Daemon, job: Job) -> Path:
    await daemon.until_step(job)
    return await daemon.run_dir(job)


@scenario
async def test_the_same_request_id_gives_the_same_job(data: Path) -> None:
    async with Daemon(data) as daemon:
        spec = await daemon.spec("steps-1")
        one, two = await asyncio.gather(*(daemon.jobs.create(ANN, spec, request_id="r-1") for _ in range(2)))
        assert one.id == two.id
        assert len(await daemon.jobs.list(ANN, limit=10)) == 1
        assert len(list((data / "jobs").iterdir())) == 1, "no folder of the second call is left"
        with pytest.raises(ServiceError, match="another specification"):
            await daemon.jobs.create(ANN, await daemon.spec("steps-2"), request_id="r-1")
        assert (await daemon.jobs.create(BEN, await daemon.spec("steps-1", BEN), request_id="r-1")).id != one.id


@scenario
async def test_keys_see_only_their_own_jobs(data: Path) -> None:
    async with Daemon(data) as daemon:
        job = await daemon.submit("steps-1")
        for call in (daemon.jobs.get, daemon.jobs.cancel, daemon.jobs.pause, daemon.jobs.delete, daemon.jobs.resume):
            with pytest.raises(ServiceError, match=f"there is no job '{job.id}'"):
                await call(BEN, job.id)
        assert await daemon.jobs.list(BEN, limit=10) == []
        with pytest.raises(ServiceError, match="admin scope"):
            await daemon.jobs.list(BEN, limit=10, everyone=True)
        assert [one.id for one in await daemon.jobs.list(ROOT, limit=10, everyone=True)] == [job.id]
        await daemon.until(job, *FINAL)


@scenario
async def test_a_specification_cannot_name_paths_of_the_machine(data: Path) -> None:
    async with Daemon(data) as daemon:
        spec = json.loads(await daemon.spec("steps-1"))
        spec["data"]["train"].append({"source": "/etc/passwd"})
        spec["model"] = {"source": "/models/other", "trust_remote_code": True}
        spec["adapter"] = {
            "init_from": "/models/adapter",
            "beside": [{"name": "sft", "source": "/models/other-adapter"}],
        }
        with pytest.raises(SpecError) as refused:
            await daemon.jobs.create(ANN, json.dumps(spec))
        assert sorted(problem.where.path or "" for problem in refused.value.problems) == [
            "adapter.beside[0].source",
            "adapter.init_from",
            "data.train[1].source",
            "model.source",
            "model.trust_remote_code",
        ]
        with pytest.raises(ServiceError, match="there is no file"):
            await daemon.jobs.create(BEN, await daemon.spec("steps-1", ANN))


@scenario
async def test_quotas_refuse_the_job_above_them(data: Path) -> None:
    async with Daemon(data, max_queued_per_key=2, max_cpu_jobs=0) as daemon:
        for _ in range(2):
            await daemon.submit("steps-1")
        with pytest.raises(ServiceError) as refused:
            await daemon.submit("steps-1")
        assert refused.value.reason is Reason.QUOTA_EXCEEDED
        assert len(list((data / "jobs").iterdir())) == 2, "the refused job left no folder"
        await daemon.submit("steps-1", BEN)


@scenario
async def test_a_deleted_job_is_gone_from_database_and_disk(data: Path) -> None:
    async with Daemon(data) as daemon:
        job = await daemon.submit("waits")
        await daemon.until_step(job)
        with pytest.raises(ServiceError, match="cancel it first"):
            await daemon.jobs.delete(ANN, job.id)
        await daemon.jobs.cancel(ANN, job.id)
        await daemon.until(job, JobState.CANCELLED)
        await daemon.jobs.delete(ANN, job.id)
        with pytest.raises(ServiceError, match="no job"):
            await daemon.jobs.get(ANN, job.id)
        assert not (data / "jobs" / job.id).exists()
        assert await daemon.database.read(lambda c: c.execute("SELECT count(*) FROM job_events").fetchone()[0]) == 0
