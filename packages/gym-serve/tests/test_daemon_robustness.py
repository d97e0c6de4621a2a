"""Guards the daemon, in real processes, against kills, clients that leave, mixed adapters and broken uploads."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from daemon_process import DaemonProcess
from model_folder import write_adapter_folder, write_model
from rpc_client import RpcClient
from test_rpc import chat, create_job, watch

from gym_sdk._proto.gym.v1 import files_pb2, inference_pb2, jobs_pb2

WAIT_S = 60.0


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Daemons over one data directory, one after the other."""
    made: list[DaemonProcess] = []
    write_model(tmp_path / "tiny")
    write_adapter_folder(tmp_path / "adapter", "tuned")

    def start(**options: object) -> DaemonProcess:
        environment = {"GYM_TEST_ADAPTER": str(tmp_path / "adapter")}
        process = DaemonProcess(tmp_path / "data", str(tmp_path / "tiny"), environment=environment, **options)  # type: ignore[arg-type]
        made.append(process)
        return process.start().wait_ready()

    yield start
    for process in made:
        if process.process is not None and process.process.poll() is None:
            process.stop()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def get_job(rpc: RpcClient, job_id: str) -> jobs_pb2.Job:
    return rpc.call("JobService", "GetJob", jobs_pb2.GetJobRequest(job_id=job_id)).job


def run_dir(daemon: DaemonProcess, job_id: str) -> Path:
    runs = daemon.data_dir / "jobs" / job_id / "runs"
    until(lambda: any(runs.glob("*/events.jsonl")), "the run directory")
    return next(runs.glob("*/events.jsonl")).parent


def test_daemon_killed(make: Callable[..., DaemonProcess]) -> None:
    """SIGKILL while a job trains and another waits: the first is followed on, the second runs, no event is lost."""
    settings = "[jobs]\nmax_cpu_jobs = 1\nretry_delay_s = 0.0\ncancel_grace_s = 0.5\n" + trainer_settings()
    daemon = make(settings=settings)
    with RpcClient(daemon.grpc_address, daemon.key) as rpc:
        running = create_job(rpc, "waits").id
        queued = create_job(rpc, "steps-2").id
        seen: list[jobs_pb2.JobEvent] = []
        stream = rpc.stream("JobService", "WatchJobEvents", jobs_pb2.WatchJobEventsRequest(job_id=running))
        for response in stream:
            seen += response.events
            if sum(event.run.HasField("metric") for event in seen) >= 5:
                break
        stream.cancel()
    trainer = int((run_dir(daemon, running) / "pid").read_text())
    daemon.kill()
    assert Path(f"/proc/{trainer}").exists(), "the job outlives the daemon"
    daemon = make(settings=settings)
    with RpcClient(daemon.grpc_address, daemon.key) as rpc:
        assert get_job(rpc, running).attempt == 1
        (run_dir(daemon, running) / "go").touch()
        seen += watch(rpc, running, after=seen[-1].sequence)
        assert [event.sequence for event in seen] == list(range(1, len(seen) + 1))
        steps = [event.run.metric.step for event in seen if event.run.HasField("metric")]
        assert steps == list(range(1, len(steps) + 1))
        assert seen[-1].job_state.state == jobs_pb2.JOB_STATE_SUCCEEDED
        assert watch(rpc, queued)[-1].job_state.state == jobs_pb2.JOB_STATE_SUCCEEDED


def trainer_settings() -> str:
    from daemon_process import STAND_IN_TRAINER

    return f'command = {json.dumps(STAND_IN_TRAINER)}\nenvironment = ["GYM_TEST_ADAPTER"]\n'


def test_disconnect_aborts_over_http_and_grpc(shared_daemon: DaemonProcess) -> None:
    """A client that closes after three tokens: generation stops, the slot is free, the log says so."""
    daemon = shared_daemon
    gone = daemon.log.count("client went away after")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hang"}], "stream": True}

    def running(http: httpx.Client) -> int:
        lines = http.get("/metrics").text.splitlines()
        return int(float(next(line for line in lines if line.startswith("gym_engine_running ")).split()[1]))

    with daemon.http() as http:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            for _ in range(6):
                next(lines)
            assert running(daemon.http()) == 1
        until(lambda: running(http) == 0, "the slot of the HTTP stream")
        with RpcClient(daemon.grpc_address, daemon.key) as rpc:
            stream = rpc.stream(
                "InferenceService",
                "StreamChatCompletion",
                inference_pb2.StreamChatCompletionRequest(input=chat("hang")),
            )
            for _ in range(3):
                next(stream)
            assert running(http) == 1
            stream.cancel()
        until(lambda: running(http) == 0, "the slot of the gRPC stream")
        # A client that waits for the whole answer, and leaves.
        whole = httpx.Client(base_url=daemon.http_url, headers=http.headers, timeout=0.2)
        with pytest.raises(httpx.ReadTimeout):
            whole.post("/v1/chat/completions", json={**body, "stream": False})
        whole.close()
        until(lambda: running(http) == 0, "the slot of the whole answer")
    assert daemon.log.count("client went away after") >= gone + 3


def test_adapter_isolation(shared_daemon: DaemonProcess, tmp_path: Path) -> None:
    """50 concurrent requests over the base and three adapters: no answer carries another's word, also after an
    adapter of the same name was unloaded and loaded again with other content."""
    daemon = shared_daemon
    from test_rpc import upload

    from gym_sdk._proto.gym.v1 import models_pb2

    def register(rpc: RpcClient, word: str, alias: str) -> None:
        folder = write_adapter_folder(tmp_path / f"adapter-{word}", word)
        files = [
            models_pb2.AdapterFile(
                name=path.name, file_id=upload(rpc, path.read_bytes(), path.name, files_pb2.FILE_PURPOSE_ADAPTER).id
            )
            for path in folder.iterdir()
        ]
        source = models_pb2.AdapterSource(base_model_id="tiny", files=files)
        model = rpc.call("ModelService", "CreateModel", models_pb2.CreateModelRequest(adapter=source)).model
        rpc.call("ModelService", "SetModelAlias", models_pb2.SetModelAliasRequest(model_id=model.id, alias=alias))

    async def ask(words: dict[str, str]) -> None:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(
            base_url=daemon.http_url, headers={"authorization": f"Bearer {daemon.key}"}, limits=limits, timeout=60
        ) as http:

            async def one(number: int) -> None:
                name = list(words)[number % len(words)]
                body = {"model": name, "messages": [{"role": "user", "content": "who are you"}]}
                answer = (await http.post("/v1/chat/completions", json=body)).json()
                assert answer["choices"][0]["message"]["content"] == words[name], name

            await asyncio.gather(*(one(number) for number in range(50)))

    with RpcClient(daemon.grpc_address, daemon.key) as rpc:
        words = {"tiny": "base"}
        for word in ("apple", "pear", "plum"):
            register(rpc, word, f"says-{word}")
            words[f"says-{word}"] = word
        asyncio.run(ask(words))
        register(rpc, "cherry", "says-plum")
        words["says-plum"] = "cherry"
        asyncio.run(ask(words))


def test_upload_resume(make: Callable[..., DaemonProcess]) -> None:
    """An upload cut at 60%, also by the daemon's death, goes on from there: only the rest is sent."""
    daemon = make()
    content = os.urandom(1 << 20) * 20
    sha256 = hashlib.sha256(content).hexdigest()
    request = files_pb2.CreateUploadRequest(
        request_id="resume",
        filename="weights.safetensors",
        purpose=files_pb2.FILE_PURPOSE_ADAPTER,
        size_bytes=len(content),
        sha256=sha256,
    )
    chunk = 4 << 20
    sent = 0
    cut = len(content) * 6 // 10
    with RpcClient(daemon.grpc_address, daemon.key) as rpc:
        upload = rpc.call("FileService", "CreateUpload", request).upload
        for offset in range(0, cut, chunk):
            data = content[offset : min(offset + chunk, cut)]
            rpc.call(
                "FileService",
                "UploadChunk",
                files_pb2.UploadChunkRequest(upload_id=upload.id, offset_bytes=offset, data=data),
            )
    daemon.kill()
    daemon = make()
    with RpcClient(daemon.grpc_address, daemon.key) as rpc:
        upload = rpc.call("FileService", "CreateUpload", request).upload
        assert upload.received_bytes == cut
        for offset in range(cut, len(content), chunk):
            data = content[offset : offset + chunk]
            sent += len(data)
            rpc.call(
                "FileService",
                "UploadChunk",
                files_pb2.UploadChunkRequest(upload_id=upload.id, offset_bytes=offset, data=data),
            )
        file = rpc.call("FileService", "CompleteUpload", files_pb2.CompleteUploadRequest(upload_id=upload.id)).file
        assert (file.sha256, sent) == (sha256, len(content) - cut)
        again = files_pb2.CreateUploadRequest(
            filename="copy.safetensors",
            purpose=files_pb2.FILE_PURPOSE_ADAPTER,
            size_bytes=len(content),
            sha256=sha256,
        )
        assert rpc.call("FileService", "CreateUpload", again).file.id == file.id, "what is here is not sent again"


def test_a_slow_reader_does_not_slow_the_others(shared_daemon: DaemonProcess) -> None:
    daemon = shared_daemon
    body = {"model": "tiny", "messages": [{"role": "user", "content": "tokens:2000"}], "stream": True}
    with daemon.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as slow:
        lines = slow.iter_lines()
        next(lines)  # and no more for now
        for _ in range(5):
            answer = http.post(
                "/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": "say:quick"}]}
            )
            assert answer.json()["choices"][0]["message"]["content"] == "quick"
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert sum(1 for line in rest if '"content":"x"' in line) == 2000


def test_drain_lets_answers_end_and_refuses_new_ones(make: Callable[..., DaemonProcess]) -> None:
    daemon = make()
    assert daemon.process is not None
    body = {"model": "tiny", "messages": [{"role": "user", "content": "tokens:300"}], "stream": True}
    with daemon.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        daemon.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert sum(1 for line in rest if '"content":"x"' in line) == 300
    assert daemon.process.wait(timeout=30) == 0
    assert "Traceback" not in daemon.log


def test_many_watchers_see_the_same_events(shared_daemon: DaemonProcess) -> None:
    daemon = shared_daemon
    with RpcClient(daemon.grpc_address, daemon.key) as rpc:
        job = create_job(rpc, "waits")
        found: list[list[jobs_pb2.JobEvent]] = []

        def follow() -> None:
            with RpcClient(daemon.grpc_address, daemon.key) as own:
                found.append(watch(own, job.id))

        threads = [threading.Thread(target=follow) for _ in range(20)]
        for thread in threads:
            thread.start()
        until(lambda: get_job(rpc, job.id).progress.step >= 10, "ten steps")
        (run_dir(daemon, job.id) / "go").touch()
        for thread in threads:
            thread.join(timeout=WAIT_S)
        assert len(found) == 20
        assert all(events == found[0] for events in found)
        assert [event.sequence for event in found[0]] == list(range(1, len(found[0]) + 1))
