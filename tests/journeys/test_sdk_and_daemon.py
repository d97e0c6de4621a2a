"""Guards that the client and the real daemon understand each other, over gRPC and HTTP, across cuts and kills."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from line import Line
from model_folder import write_adapter_folder, write_model

from gym_sdk.client import Gym
from gym_sdk.client.errors import AuthenticationFailed, Conflict, InvalidRequest, NotFound, PermissionDenied
from gym_sdk.client.types import JobEvent, JobState, ModelKind
from gym_sdk.events import MetricEvent

ROW = '{"messages": [{"role": "user", "content": "%d"}, {"role": "assistant", "content": "b"}]}\n'


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("daemon")
    model = write_model(folder / "tiny")
    adapter = write_adapter_folder(folder / "adapter", "tuned")
    with DaemonProcess(folder / "data", str(model), environment={"GYM_TEST_ADAPTER": str(adapter)}) as process:
        yield process.wait_ready()


@pytest.fixture(params=["grpc", "http"])
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    with Line() as opened:
        opened.scheme = request.param  # pyright: ignore[reportAttributeAccessIssue]
        yield opened


def lead(line: Line, daemon: DaemonProcess) -> str:
    """Leads the line to the daemon; returns the client's address."""
    scheme: str = line.scheme  # pyright: ignore[reportAttributeAccessIssue]
    line.lead_to(daemon.grpc_address if scheme == "grpc" else daemon.http_url.partition("://")[2])
    return f"{scheme}://{line.address}"


@pytest.fixture
def gym(line: Line, daemon: DaemonProcess) -> Iterator[Gym]:
    with Gym(lead(line, daemon), api_key=daemon.key, timeout_s=60, patience_s=60) as client:
        yield client


def spec(folder: Path, name: str, model: str = "tiny") -> Path:
    (folder / "rows.jsonl").write_text("".join(ROW % number for number in range(5)))
    (folder / "run.yaml").write_text(
        f"name: {name}\nmodel: {{source: {model}}}\ndata: {{train: [{{source: rows.jsonl}}]}}\n"
    )
    return folder / "run.yaml"


def check_sequence(events: list[JobEvent], steps: int | None = None) -> None:
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    if steps is not None:
        assert [e.run.step for e in events if isinstance(e.run, MetricEvent)] == list(range(1, steps + 1))


def test_the_whole_journey(gym: Gym, tmp_path: Path) -> None:
    job = gym.jobs.create(spec(tmp_path, "steps-5"), num_gpus=0, labels={"class": "7b"})
    assert job.spec.data.train[0].source.startswith("file:")
    events = list(job.events(follow=True))
    check_sequence(events, steps=5)
    assert events[-1].state is JobState.SUCCEEDED
    assert [event.sequence for event in job.events(after=2)] == [event.sequence for event in events[2:]]

    done = job.wait(timeout_s=60)
    assert (done.state, done.progress.step) == (JobState.SUCCEEDED, 5)
    assert done.last_sequence == len(events)
    assert done.id in [each.id for each in gym.jobs.list(labels={"class": "7b"})]
    folder = done.adapter.download(tmp_path / "adapter")
    artifact = done.adapter.describe()
    for file in artifact.files:
        assert hashlib.sha256((folder / file.path).read_bytes()).hexdigest() == file.sha256
    assert {file.path for file in artifact.files} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert [checkpoint.step for checkpoint in done.checkpoints()] == [5, 4, 3, 2, 1]

    model = gym.models.get(done.model_id)
    assert (model.kind, model.base_model_id, model.lineage.job_id) == (ModelKind.ADAPTER, "tiny", done.id)
    answer = gym.chat.create(done.model_id, "hello", max_tokens=20)
    assert answer.text == "tuned"
    with gym.chat.stream(done.model_id, "hello", max_tokens=20) as stream:
        assert "".join(chunk.text for chunk in stream) == "tuned"
    assert stream.so_far().usage == answer.usage
    assert gym.chat.create("tiny", "hello", max_tokens=20).text != "tuned"
    done.delete()
    with pytest.raises(NotFound) as caught:
        done.refresh()
    assert caught.value.reason == "JOB_NOT_FOUND"
    assert caught.value.request_id


def test_a_follower_goes_on_when_the_line_is_cut(gym: Gym, line: Line, tmp_path: Path) -> None:
    job = gym.jobs.create(spec(tmp_path, "steps-40"), num_gpus=0)
    events = []
    for event in job.events(follow=True):
        events.append(event)
        if event.sequence % 7 == 0:
            line.cut()
    check_sequence(events, steps=40)


def test_a_follower_goes_on_when_the_daemon_is_killed(line: Line, tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path / "daemon").start()
    try:
        with Gym(lead(line, daemon), api_key=daemon.key, patience_s=60) as gym:
            job = gym.jobs.create(spec(tmp_path, "waits", "Qwen/Qwen3-8B"), num_gpus=0)
            events: list[JobEvent] = []
            enough = threading.Event()

            def follow() -> None:
                for event in job.events(follow=True):
                    events.append(event)
                    if len(events) >= 10:
                        enough.set()

            follower = threading.Thread(target=follow)
            follower.start()
            assert enough.wait(60)
            daemon.kill()
            line.cut()
            daemon.start()
            lead(line, daemon)
            (run,) = (tmp_path / "daemon").rglob("run.json")
            (run.parent / "go").touch()
            done = job.wait(timeout_s=60, check=False)
            follower.join(60)
        assert not follower.is_alive()
        check_sequence(events)
        steps = [event.run.step for event in events if isinstance(event.run, MetricEvent)]
        assert steps == list(range(1, len(steps) + 1))
        assert events[-1].state is done.state
    finally:
        daemon.stop()


def test_an_upload_goes_on_after_a_cut_and_sends_only_the_rest(gym: Gym, line: Line, tmp_path: Path) -> None:
    name = f"rows-{random.randrange(10**9)}.jsonl"
    (tmp_path / name).write_text("".join(ROW % number for number in range(30_000)))
    size_bytes = (tmp_path / name).stat().st_size
    line.cut_after_bytes_up = line.bytes_up + size_bytes * 6 // 10
    file = gym.files.upload(tmp_path / name)
    assert line.cut_after_bytes_up is None
    # What was in flight when the line was cut is sent again: one chunk of 1 MiB, and the calls around it.
    assert line.bytes_up < size_bytes + 1.5 * 2**20
    assert file.dataset is not None
    assert file.dataset.num_rows == 30_000
    target = gym.files.download(file.id, tmp_path / "back")
    assert target.read_bytes() == (tmp_path / name).read_bytes()
    gym.files.delete(file.id)


def test_a_cancelled_job_reads_cancelled(gym: Gym, tmp_path: Path) -> None:
    job = gym.jobs.create(spec(tmp_path, "workers"), num_gpus=0)
    for event in job.events(follow=True):
        if isinstance(event.run, MetricEvent):
            job.cancel()
    assert job.refresh().state is JobState.CANCELLED
    assert job.cancel().state is JobState.CANCELLED


def test_a_failed_job_says_why(gym: Gym, tmp_path: Path) -> None:
    done = gym.jobs.create(spec(tmp_path, "fails"), num_gpus=0).wait(timeout_s=60, check=False)
    assert done.state is JobState.FAILED
    assert done.failure is not None
    assert done.failure.exit_code == 1
    assert any("the loss was not a number" in text for text in (done.failure.message, *done.failure.log_lines))
    assert "the loss was not a number" in "".join(done.logs())


def test_refusals_are_typed(gym: Gym, line: Line, daemon: DaemonProcess, tmp_path: Path) -> None:
    source = {"model": {"source": "Qwen/Qwen3-8B"}, "data": {"train": [{"source": "file:file-nope"}]}}
    with pytest.raises((InvalidRequest, NotFound)) as caught:
        gym.jobs.create(source)
    assert caught.value.exit_code == 2
    assert "file-nope" in str(caught.value)
    (tmp_path / "bad.jsonl").write_text("{bad\n")
    with pytest.raises(InvalidRequest) as refused:
        gym.files.upload(tmp_path / "bad.jsonl")
    assert refused.value.reason == "DATASET_INVALID"
    with pytest.raises(NotFound) as missing:
        gym.chat.create("nope", "hi")
    assert missing.value.reason == "MODEL_NOT_FOUND"
    with Gym(lead(line, daemon), api_key="gym-wrong") as stranger, pytest.raises(AuthenticationFailed):
        stranger.server_info()
    key, secret = gym.keys.create(f"seat {random.randrange(10**9)}")
    with Gym(lead(line, daemon), api_key=secret) as pupil:
        assert pupil.server_info().key_id == key.id
        with pytest.raises(PermissionDenied):
            pupil.keys.create("mine")
    gym.keys.revoke(key.id)
    with pytest.raises((NotFound, Conflict)):
        gym.keys.revoke(key.id)


def test_the_commands_find_this_machines_daemon_and_make_the_journey(daemon: DaemonProcess, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GYM_")}
    environment["GYM_DATA_DIR"] = str(daemon.data_dir)
    environment["GYM_CONFIG_DIR"] = str(tmp_path / "config")

    def gym(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from gym_sdk.cli import main; main()", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    spec(tmp_path, "steps-3")
    submitted = gym("jobs", "submit", "run.yaml", "--gpus", "0", "--watch")
    assert submitted.returncode == 0, submitted.stderr
    job_id = submitted.stdout.strip()
    assert f"job {job_id} succeeded; its model is " in submitted.stderr
    job = json.loads(gym("jobs", "get", job_id, "--json").stdout)
    assert (job["state"], job["progress"]["step"]) == ("succeeded", 3)
    assert gym("jobs", "download", job_id, "adapter").stdout == "adapter\n"
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    answer = gym("chat", job["model_id"], "hello", "--max-tokens", "20")
    assert (answer.returncode, answer.stdout) == (0, "tuned\n")
    address = f"{daemon.http_url}/v1"
    environment["THE_KEY"] = daemon.key
    answer = gym("chat", address, "hello", "--model", job["model_id"], "--api-key-env", "THE_KEY")
    assert (answer.returncode, answer.stdout) == (0, "tuned\n")
    failed = gym("jobs", "submit", str(spec(tmp_path, "fails")), "--gpus", "0", "--watch")
    assert failed.returncode == 1
    assert "the loss was not a number" in failed.stderr + gym("jobs", "logs", failed.stdout.strip()).stdout
