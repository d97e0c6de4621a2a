"""Guards jobs on a Slurm cluster, with stand-ins for its commands: submitted once, found again, ended, resumed."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_process import STAND_IN_TRAINER, DaemonProcess
from model_folder import write_adapter_folder, write_model
from rpc_client import RpcClient
from stand_in_slurm import install
from test_daemon_robustness import get_job, run_dir, until
from test_rpc import create_job, watch
from test_serve_command import gym

from gym_sdk._proto.gym.v1 import jobs_pb2
from gym_serve.gpus import plan_gpus
from gym_serve.settings import load_settings

SETTINGS = f"""[jobs]
launcher = "slurm"
slurm_options = ["--partition=gpu"]
num_gpus = 2
slurm_settle_s = 0.5
command = {json.dumps(STAND_IN_TRAINER)}
environment = ["GYM_TEST_ADAPTER", "PYTHONPATH"]
retry_delay_s = 0.0
cancel_grace_s = 0.5
"""

ONE_GPU = jobs_pb2.JobResources(num_gpus=1)


@pytest.fixture
def queue(tmp_path: Path) -> Path:
    return tmp_path / "slurm" / "queue"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], DaemonProcess]]:
    """Daemons over one data directory, one after the other, beside one cluster."""
    made: list[DaemonProcess] = []
    model = write_model(tmp_path / "tiny")
    environment = {
        "GYM_TEST_ADAPTER": str(write_adapter_folder(tmp_path / "adapter", "tuned")),
        "SECRET_OF_THE_DAEMON": "x",
        **install(tmp_path / "slurm"),
    }

    def start() -> DaemonProcess:
        made.append(DaemonProcess(tmp_path / "data", str(model), settings=SETTINGS, environment=environment))
        return made[-1].start().wait_ready()

    yield start
    for process in made:
        if process.process is not None and process.process.poll() is None:
            process.stop()


def test_a_job_runs_as_a_batch_job_and_its_model_answers(make: Callable[[], DaemonProcess], queue: Path) -> None:
    daemon = make()
    with RpcClient(daemon.grpc_address, daemon.key) as rpc:
        job_id = create_job(rpc, "steps-5", resources=ONE_GPU).id
        events = watch(rpc, job_id)
        job = get_job(rpc, job_id)
    assert [event.run.metric.step for event in events if event.run.HasField("metric")] == [1, 2, 3, 4, 5]
    assert (job.state, job.attempt) == (jobs_pb2.JOB_STATE_SUCCEEDED, 1)
    with daemon.http() as http:
        body = {"model": job.model_id, "messages": [{"role": "user", "content": "who are you"}]}
        answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "tuned"
    submitted = json.loads((queue / "1.json").read_text(encoding="utf-8"))["options"]
    assert submitted["partition"] == "gpu"
    assert submitted["gpus-per-node"] == "1"
    assert submitted["job-name"] == f"gym-{job_id}"
    attempt = daemon.data_dir / "jobs" / job_id / "attempt-1"
    assert stat.S_IMODE((attempt / "job.sh").stat().st_mode) == 0o600, "it may hold a key"
    seen = json.loads((run_dir(daemon, job_id) / "environment.json").read_text(encoding="utf-8"))
    assert seen["CUDA_VISIBLE_DEVICES"] == "5", "the GPU that Slurm gave"
    assert seen["SLURM_JOB_ID"] == "1"
    assert "SECRET_OF_THE_DAEMON" not in seen


def test_cancel_takes_a_waiting_job_out_of_the_queue_and_ends_every_process_of_a_running_one(
    make: Callable[[], DaemonProcess], queue: Path
) -> None:
    daemon = make()
    with RpcClient(daemon.grpc_address, daemon.key) as rpc:
        running = create_job(rpc, "workers").id
        workers = run_dir(daemon, running) / "workers"
        until(lambda: workers.exists() and len(workers.read_text().split()) == 2, "two workers")
        (queue / "busy").touch()
        waiting = create_job(rpc, "steps-1", resources=ONE_GPU).id
        until(lambda: (queue / "2.state").exists(), "the second batch job")
        for job_id in (running, waiting):
            rpc.call("JobService", "CancelJob", jobs_pb2.CancelJobRequest(job_id=job_id))
            assert watch(rpc, job_id)[-1].job_state.state == jobs_pb2.JOB_STATE_CANCELLED
    assert not list(queue.glob("*.state"))
    assert not [pid for pid in workers.read_text().split() if Path(f"/proc/{pid}").exists()]


def test_a_killed_daemon_finds_its_batch_jobs_again(make: Callable[[], DaemonProcess], queue: Path) -> None:
    daemon = make()
    with RpcClient(daemon.grpc_address, daemon.key) as rpc:
        running = create_job(rpc, "waits").id
        folder = run_dir(daemon, running)
        (queue / "busy").touch()
        waiting = create_job(rpc, "steps-3", resources=ONE_GPU).id
        until(lambda: get_job(rpc, waiting).attempt == 1, "its start is written down")
    daemon.kill()
    (folder / "go").touch()
    (queue / "busy").unlink()
    daemon = make()
    with RpcClient(daemon.grpc_address, daemon.key) as rpc:
        for job_id in (running, waiting):
            events = watch(rpc, job_id)
            assert [event.sequence for event in events] == list(range(1, len(events) + 1))
            assert get_job(rpc, job_id).state == jobs_pb2.JOB_STATE_SUCCEEDED
            assert get_job(rpc, job_id).attempt == 1
    assert len(list(queue.glob("*.json"))) == 2, "nothing was submitted twice"


def test_an_end_that_slurm_makes_is_an_interruption(make: Callable[[], DaemonProcess], queue: Path) -> None:
    """The signal before a time limit, and the kill of a whole job: both go on from the last checkpoint."""
    daemon = make()
    with RpcClient(daemon.grpc_address, daemon.key) as rpc:
        job_id = create_job(rpc, "waits").id
        folder = run_dir(daemon, job_id)
        ends = (lambda pid: os.kill(pid, signal.SIGTERM), lambda pid: os.killpg(pid, signal.SIGKILL))
        for number, end in enumerate(ends, start=1):
            until(lambda number=number: (queue / f"{number}.pid").exists(), "the batch job")
            seen = get_job(rpc, job_id).progress.step
            until(lambda seen=seen: get_job(rpc, job_id).progress.step > seen, "a step of this attempt")
            end(int((queue / f"{number}.pid").read_text()))
            until(lambda number=number: get_job(rpc, job_id).attempt == number + 1, "the next attempt")
        (folder / "go").touch()
        steps = [event.run.metric.step for event in watch(rpc, job_id) if event.run.HasField("metric")]
        assert sorted(set(steps)) == list(range(1, max(steps) + 1))
        assert (get_job(rpc, job_id).state, get_job(rpc, job_id).attempt) == (jobs_pb2.JOB_STATE_SUCCEEDED, 3)


def test_a_controller_that_does_not_answer_ends_no_job(make: Callable[[], DaemonProcess], queue: Path) -> None:
    daemon = make()
    with RpcClient(daemon.grpc_address, daemon.key) as rpc:
        job_id = create_job(rpc, "waits").id
        folder = run_dir(daemon, job_id)
        (queue / "down").touch()
        until(lambda: "Unable to contact slurm controller" in daemon.log, "the failure is logged")
        assert get_job(rpc, job_id).state == jobs_pb2.JOB_STATE_RUNNING
        (queue / "down").unlink()
        (folder / "go").touch()
        assert watch(rpc, job_id)[-1].job_state.state == jobs_pb2.JOB_STATE_SUCCEEDED
        assert get_job(rpc, job_id).attempt == 1
        (queue / "closed").touch()
        refused = create_job(rpc, "steps-1").id
        assert watch(rpc, refused)[-1].job_state.state == jobs_pb2.JOB_STATE_FAILED
        assert "Invalid account" in get_job(rpc, refused).failure.message


def test_settings_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    for text, message in (
        ('[jobs]\nlauncher = "slurm"\n', "say how many of the cluster's GPUs"),
        ('[jobs]\nlauncher = "slurm"\nnum_gpus = 2\n', "there is no sbatch on the daemon's PATH"),
    ):
        (tmp_path / "serve.toml").write_text(text, encoding="utf-8")
        (tmp_path / "empty").mkdir(exist_ok=True)
        result = gym("serve", "--settings", "serve.toml", cwd=tmp_path, environment={"PATH": str(tmp_path / "empty")})
        assert (result.returncode, message in result.stderr) == (2, True), result.stderr


def test_the_engine_shares_nothing_with_jobs_of_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('[jobs]\nlauncher = "slurm"\nnum_gpus = 8\n', encoding="utf-8")
    plan = plan_gpus(load_settings(path, {}), 1)
    assert (plan.num_for_jobs, plan.engine, plan.must_yield({0})) == (8, (0,), False)
