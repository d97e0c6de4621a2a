"""Guards who gets which GPU: the policies, and a daemon whose engine leaves its only GPU to a job and comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess
from model_folder import write_adapter_folder, write_model
from rpc_client import RpcClient
from test_daemon_robustness import get_job, run_dir, until
from test_rpc import create_job, watch

from gym_sdk._proto.gym.v1 import jobs_pb2
from gym_sdk.errors import UserError
from gym_serve.gpus import GpuPlan, plan_gpus
from gym_serve.settings import load_settings

PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any], tuple[int, tuple[int, ...], str]]] = {
    "no GPU": (0, {}, {}, (0, (), "share")),
    "an engine on the processor": (2, {"device": "cpu"}, {}, (2, (), "share")),
    "one GPU": (1, {}, {}, (1, (0,), "yield")),
    "one GPU, shared": (1, {"gpu_policy": "share"}, {}, (1, (0,), "share")),
    "one GPU, reserved": (1, {"gpu_policy": "reserve"}, {}, (0, (0,), "reserve")),
    "eight": (8, {}, {}, (7, (7,), "reserve")),
    "eight, jobs first": (8, {"gpu_policy": "yield"}, {}, (8, (7,), "yield")),
    "eight, jobs on two": (8, {}, {"num_gpus": 2}, (2, (7,), "yield")),
    "the engine on one by name": (4, {"device": "cuda:2"}, {}, (2, (2,), "reserve")),
    "vLLM on two of four": (4, {"kind": "vllm", "num_gpus": 2}, {}, (2, (2, 3), "reserve")),
    "vLLM on all": (4, {"kind": "vllm", "num_gpus": 4}, {}, (4, (0, 1, 2, 3), "yield")),
    "vLLM elsewhere": (4, {"kind": "vllm", "vllm_url": "http://gpu.example:8000"}, {}, (4, (), "share")),
}


@pytest.mark.parametrize(("num_visible", "engine", "jobs", "expected"), PLANS.values(), ids=PLANS.keys())
def test_the_plan(
    num_visible: int, engine: dict[str, Any], jobs: dict[str, Any], expected: tuple[int, tuple[int, ...], str]
) -> None:
    plan = plan_gpus(load_settings(None, {"engine": engine, "jobs": jobs}), num_visible)
    assert (plan.num_for_jobs, plan.engine, plan.policy) == expected
    if plan.policy == "reserve":
        assert not set(plan.engine) & set(range(plan.num_for_jobs))


def test_an_engine_yields_only_to_jobs_on_its_own_gpus() -> None:
    plan = GpuPlan(num_for_jobs=4, engine=(2, 3), policy="yield")
    assert [plan.must_yield(held) for held in ({0, 1}, {3}, {0, 2}, set())] == [False, True, True, False]


@pytest.mark.parametrize("engine", [{"device": "cuda:4"}, {"kind": "vllm", "num_gpus": 5}], ids=str)
def test_more_than_there_is_is_refused(engine: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="there are 4"):
        plan_gpus(load_settings(None, {"engine": engine}), 4)


def daemon_with(tmp_path: Path, gpus: str, engine: str = "") -> DaemonProcess:
    model = write_model(tmp_path / "tiny")
    adapter = write_adapter_folder(tmp_path / "adapter", "tuned")
    environment = {"CUDA_VISIBLE_DEVICES": gpus, "GYM_TEST_ADAPTER": str(adapter)}
    settings = f'[engine]\nkind = "stand_in_engine:start"\n{engine}'
    return DaemonProcess(tmp_path / "data", str(model), settings=settings, environment=environment, engine="")


def ask(daemon: DaemonProcess, model: str = "tiny") -> tuple[int, str, str]:
    with daemon.http() as http:
        body = {"model": model, "messages": [{"role": "user", "content": "who are you"}]}
        answer = http.post("/v1/chat/completions", json=body)
    data = answer.json()
    text = data["choices"][0]["message"]["content"] if answer.status_code == 200 else data["error"]["message"]
    return answer.status_code, text, answer.headers.get("retry-after", "")


def test_on_one_gpu_the_engine_leaves_it_to_a_job_and_comes_back(tmp_path: Path) -> None:
    with daemon_with(tmp_path, "GPU-7f") as daemon:
        daemon.wait_ready()
        assert ask(daemon)[:2] == (200, "base")
        with RpcClient(daemon.grpc_address, daemon.key) as rpc:
            job = create_job(rpc, "waits")
            until(lambda: get_job(rpc, job.id).progress.step >= 1, "a step")
            status, message, retry_after = ask(daemon)
            assert (status, "training a job" in message, retry_after) == (503, True, "30")
            with daemon.http() as http:
                assert "training a job" in http.get("/readyz").json()["model"]
            environment = json.loads((run_dir(daemon, job.id) / "environment.json").read_text())
            assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-7f"
            # Also a daemon that is killed meanwhile knows that the job has the GPU.
            daemon.kill()
            daemon.start()
        with RpcClient(daemon.grpc_address, daemon.key) as rpc:
            assert ask(daemon)[0] == 503
            (run_dir(daemon, job.id) / "go").touch()
            assert watch(rpc, job.id)[-1].job_state.state == jobs_pb2.JOB_STATE_SUCCEEDED
            until(lambda: ask(daemon)[0] == 200, "the engine's return")
            daemon.wait_ready()
            assert ask(daemon, get_job(rpc, job.id).model_id)[:2] == (200, "tuned")


def test_on_two_gpus_the_engine_keeps_the_last(tmp_path: Path) -> None:
    with daemon_with(tmp_path, "4,6") as daemon:
        daemon.wait_ready()
        assert (tmp_path / "tiny" / "device").read_text() == "cuda:1"
        with RpcClient(daemon.grpc_address, daemon.key) as rpc:
            job = create_job(rpc, "waits")
            until(lambda: get_job(rpc, job.id).progress.step >= 1, "a step")
            assert ask(daemon)[:2] == (200, "base")
            environment = json.loads((run_dir(daemon, job.id) / "environment.json").read_text())
            assert environment["CUDA_VISIBLE_DEVICES"] == "4"
            (run_dir(daemon, job.id) / "go").touch()
            watch(rpc, job.id)
