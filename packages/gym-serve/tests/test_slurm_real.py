"""Guards jobs on a real Slurm, where one runs here: its commands mean what the stand-ins take them for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import STAND_IN_TRAINER, DaemonProcess
from model_folder import write_adapter_folder, write_model
from rpc_client import RpcClient
from test_daemon_robustness import get_job, run_dir, until
from test_rpc import create_job, watch

from gym_sdk._proto.gym.v1 import jobs_pb2


def has_slurm() -> bool:
    if shutil.which("sinfo") is None:
        return False
    found = subprocess.run(["sinfo", "--noheader", "--format=%t"], capture_output=True, text=True, check=False)
    return found.returncode == 0 and "idle" in found.stdout.split()


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not has_slurm(), reason="needs a Slurm node"),
]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    adapter = write_adapter_folder(tmp_path / "adapter", "tuned")
    process = DaemonProcess(
        tmp_path / "data",
        str(write_model(tmp_path / "tiny")),
        settings=f'[jobs]\nlauncher = "slurm"\nnum_gpus = 0\nmax_cpu_jobs = 8\nslurm_settle_s = 2.0\n'
        f"command = {json.dumps(STAND_IN_TRAINER)}\nretry_delay_s = 0.0\ncancel_grace_s = 2.0\n"
        f'environment = ["GYM_TEST_ADAPTER", "PYTHONPATH"]\n',
        environment={"GYM_TEST_ADAPTER": str(adapter), "SECRET_OF_THE_DAEMON": "x"},
    )
    with process:
        yield process.wait_ready()


def queue() -> list[str]:
    return subprocess.run(
        ["squeue", "--noheader", "--me", "--format=%j"], capture_output=True, text=True, check=True
    ).stdout.split()


def slurm_number(daemon: DaemonProcess, job_id: str) -> str:
    environment = json.loads((run_dir(daemon, job_id) / "environment.json").read_text(encoding="utf-8"))
    assert "SECRET_OF_THE_DAEMON" not in environment
    return environment["SLURM_JOB_ID"]


def test_run_cancel_find_again_and_resume(daemon: DaemonProcess) -> None:
    with RpcClient(daemon.grpc_address, daemon.key) as rpc:
        first = create_job(rpc, "steps-5").id
        events = watch(rpc, first)
        assert events[-1].job_state.state == jobs_pb2.JOB_STATE_SUCCEEDED
        assert [event.run.metric.step for event in events if event.run.HasField("metric")] == [1, 2, 3, 4, 5]

        # Enough jobs to fill the node, so that the last ones wait in Slurm's own queue.
        running = create_job(rpc, "workers").id
        workers = run_dir(daemon, running) / "workers"
        until(lambda: workers.exists() and len(workers.read_text().split()) == 2, "two workers")
        others = [create_job(rpc, "waits").id for _ in range(os.cpu_count() or 1)]
        until(lambda: len(queue()) == 1 + len(others), "all of them in Slurm's queue")
        waiting = others.pop()
        for job_id in (waiting, running):
            rpc.call("JobService", "CancelJob", jobs_pb2.CancelJobRequest(job_id=job_id))
            assert watch(rpc, job_id)[-1].job_state.state == jobs_pb2.JOB_STATE_CANCELLED
        assert not [pid for pid in workers.read_text().split() if Path(f"/proc/{pid}").exists()]
        until(lambda: len(queue()) == len(others), "the cancelled ones have left")
        kept = others[0]
        number = slurm_number(daemon, kept)

    daemon.kill()
    daemon.start().wait_ready()
    with RpcClient(daemon.grpc_address, daemon.key) as rpc:
        assert (get_job(rpc, kept).state, get_job(rpc, kept).attempt) == (jobs_pb2.JOB_STATE_RUNNING, 1)
        subprocess.run(["scancel", number], check=True)  # as an administrator or a preemption does
        until(lambda: get_job(rpc, kept).attempt == 2, "the next attempt")
        (run_dir(daemon, kept) / "go").touch()
        steps = [event.run.metric.step for event in watch(rpc, kept) if event.run.HasField("metric")]
        assert sorted(set(steps)) == list(range(1, max(steps) + 1))
        assert get_job(rpc, kept).state == jobs_pb2.JOB_STATE_SUCCEEDED
        for job_id in others[1:]:
            (run_dir(daemon, job_id) / "go").touch()
            assert watch(rpc, job_id)[-1].job_state.state == jobs_pb2.JOB_STATE_SUCCEEDED
    assert queue() == []
