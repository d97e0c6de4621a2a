"""Guards the client: what it sends, what it repeats, what it never repeats, and where it goes on after a break."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from gym_sdk_fakes.daemon import KEY, Daemon
from gym_sdk_fakes.refusal import CUT, Code, Refusal
from gym_sdk_fakes.servers import serve_connect, serve_grpc

from gym_sdk._proto.gym.v1 import jobs_pb2
from gym_sdk.client import AsyncGym, Gym, _retry
from gym_sdk.client._retry import may_repeat
from gym_sdk.client.errors import (
    AuthenticationFailed,
    Conflict,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    RemoteError,
    ServerFault,
    TimedOut,
    Unavailable,
)
from gym_sdk.client.types import JobState, KeyQuota, ModelKind, ModelState
from gym_sdk.errors import RunFailed, SpecError, UserError
from gym_sdk.events import MetricEvent


def submitted(gym: Gym, spec_path: Path) -> str:
    return gym.jobs.create(spec_path).id


# Errors


def test_every_call_carries_key_client_and_request_id(gym: Gym, daemon: Daemon) -> None:
    assert gym.server_info().can_train
    (sent,) = daemon.metadata
    assert sent["authorization"] == f"Bearer {KEY}"
    assert sent["x-request-id"].startswith("req-")
    assert sent["x-gym-client"].startswith("gym-sdk/")


def test_an_unknown_key_is_named_as_such(base_url: str) -> None:
    with Gym(base_url, api_key="wrong") as gym, pytest.raises(AuthenticationFailed) as caught:
        gym.server_info()
    assert (caught.value.code, caught.value.reason) == ("UNAUTHENTICATED", "KEY_INVALID")
    assert caught.value.exit_code == 2


def test_an_error_brings_reason_hint_and_request_id(gym: Gym) -> None:
    with pytest.raises(NotFound) as caught:
        gym.jobs.get("job-9")
    error = caught.value
    assert (error.reason, error.request_id) == ("JOB_NOT_FOUND", "req-of-the-daemon")
    assert str(error) == "there is no job job-9\nhint: gym jobs list shows them"


def test_a_fault_of_the_daemon_names_the_request(gym: Gym, daemon: Daemon) -> None:
    daemon.fail("GetJob", Refusal(Code.INTERNAL, "INTERNAL", "the daemon failed"))
    with pytest.raises(ServerFault) as caught:
        gym.jobs.get("job-1")
    assert str(caught.value) == "the daemon failed\nrequest: req-of-the-daemon"
    assert caught.value.exit_code == 1


def test_nobody_there_says_what_to_do() -> None:
    for url in ("grpc://127.0.0.1:1", "http://127.0.0.1:1"):
        with Gym(url, api_key="k", timeout_s=0.3) as gym, pytest.raises(Unavailable) as caught:
            gym.server_info()
        assert caught.value.message.startswith(f"no daemon answers at {url}")
        assert "is the daemon running" in (caught.value.hint or "")


def test_an_answer_of_something_in_between_is_told_as_such(daemon: Daemon) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(403)
            self.end_headers()
            self.wfile.write(b"<html>Blocked by   IT</html>")

        def log_message(self, format: str, *args: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.handle_request, daemon=True).start()
    with Gym(f"http://127.0.0.1:{server.server_port}", api_key="k") as gym:
        with pytest.raises(Exception, match="HTTP 403: <html>Blocked by IT</html>") as caught:
            gym.server_info()
        assert type(caught.value).__name__ == "PermissionDenied"
    server.server_close()


# Repeating


def test_a_read_is_repeated_until_it_answers(gym: Gym, daemon: Daemon) -> None:
    daemon.fail("GetServerInfo", CUT, times=3)
    assert gym.server_info().version == "0.1.0"
    assert daemon.count("GetServerInfo") == 4
    assert len({sent["x-request-id"] for sent in daemon.metadata}) == 1


def test_a_repeated_create_makes_one_job(gym: Gym, daemon: Daemon, spec_path: Path) -> None:
    daemon.fail("CreateJob", CUT, after_messages=1)  # the job is made, and the answer is lost
    job = gym.jobs.create(spec_path)
    assert daemon.count("CreateJob") == 2
    assert list(daemon.jobs) == [job.id]


@pytest.mark.parametrize("method", ["ResumeJob", "CreateKey"])
def test_what_must_not_happen_twice_is_not_repeated(gym: Gym, daemon: Daemon, spec_path: Path, method: str) -> None:
    job_id = submitted(gym, spec_path)
    daemon.fail(method, CUT)
    with pytest.raises(Unavailable):
        {
            "ResumeJob": lambda: gym.jobs.resume(job_id),
            "CreateKey": lambda: gym.keys.create("x"),
        }[method]()
    assert daemon.count(method) == 1


def test_an_answer_that_was_cut_is_asked_for_twice_more(gym: Gym, daemon: Daemon) -> None:
    """Generation changes nothing, but costs."""
    daemon.fail("CreateChatCompletion", CUT, times=2)
    assert gym.chat.create("base", "hello").text == "hello"
    daemon.fail("CreateChatCompletion", CUT, times=5)
    with pytest.raises(Unavailable):
        gym.chat.create("base", "hello")
    assert daemon.count("CreateChatCompletion") == 3 + 3


def test_a_streamed_answer_is_asked_for_again_until_its_first_piece_has_come(gym: Gym, daemon: Daemon) -> None:
    daemon.fail("StreamChatCompletion", CUT, times=2)
    assert gym.chat.stream("base", "a b c").collect().text == "a b c"
    assert daemon.count("StreamChatCompletion") == 3
    daemon.fail("StreamChatCompletion", CUT, after_messages=2)
    stream = gym.chat.stream("base", "a b c")
    with pytest.raises(Unavailable) as caught:
        stream.collect()
    assert (stream.so_far().text, caught.value.never_sent) == ("a b", False)
    assert caught.value.message.startswith("the connection to ")
    assert daemon.count("StreamChatCompletion") == 4


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_what_was_never_sent_is_sent_when_the_daemon_is_there(
    scheme: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what must not happen twice: no connection, so nothing has happened."""
    monkeypatch.setattr(_retry, "FIRST_DELAY_S", 0.05)
    monkeypatch.setattr(_retry, "LARGEST_DELAY_S", 0.05)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    refused = threading.Event()
    asked = may_repeat

    def seen(error: RemoteError, *rest: object) -> bool:
        assert isinstance(error, Unavailable)
        assert error.never_sent
        refused.set()
        return asked(error, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("gym_sdk.client._sync.caller.may_repeat", seen)
    with Gym(f"{scheme}://127.0.0.1:{port}", api_key=KEY, timeout_s=30) as gym, ThreadPoolExecutor() as pool:
        made = pool.submit(gym.keys.create, "seat 7")
        assert refused.wait(timeout=30)
        server, _ = (serve_grpc if scheme == "grpc" else serve_connect)(daemon, port)
        try:
            assert made.result(timeout=30)[0].name == "seat 7"
        finally:
            server.stop(grace=None) if isinstance(server, grpc.Server) else server.shutdown()
    assert daemon.count("CreateKey") == 1


def test_a_daemon_that_has_answered_is_given_time_to_start_again(base_url: str, daemon: Daemon) -> None:
    with Gym(base_url, api_key=KEY, connect_timeout_s=0.0) as gym:
        daemon.fail("GetServerInfo", CUT)
        with pytest.raises(Unavailable):
            gym.server_info()
        assert gym.server_info().can_train
        daemon.fail("GetServerInfo", CUT, times=5)
        assert gym.server_info().can_train


@pytest.mark.parametrize(
    ("code", "reason"),
    [(Code.UNAVAILABLE, "ENGINE_DOWN"), (Code.UNAVAILABLE, "DRAINING"), (Code.RESOURCE_EXHAUSTED, "RATE_LIMITED")],
)
def test_what_was_refused_before_any_work_is_repeated(gym: Gym, daemon: Daemon, code: Code, reason: str) -> None:
    daemon.fail("CreateChatCompletion", Refusal(code, reason), times=2)
    assert gym.chat.create("base", "hello").text == "hello"
    assert daemon.count("CreateChatCompletion") == 3


def test_a_quota_is_not_asked_again(gym: Gym, daemon: Daemon, spec_path: Path) -> None:
    daemon.fail("CreateJob", Refusal(Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", "4 jobs are running"))
    with pytest.raises(LimitExceeded, match="4 jobs are running"):
        gym.jobs.create(spec_path)
    assert daemon.count("CreateJob") == 1


def test_the_deadline_holds_over_all_attempts(base_url: str, daemon: Daemon) -> None:
    daemon.fail("GetServerInfo", Refusal(Code.UNAVAILABLE, "ENGINE_DOWN", "down", retry_after_s=0.3), times=1000)
    # Where the machine is slow, time runs out in an attempt and not between two.
    with Gym(base_url, api_key=KEY, timeout_s=1.0) as gym, pytest.raises((Unavailable, TimedOut)):
        gym.server_info()
    assert 2 <= daemon.count("GetServerInfo") <= 4


def test_the_daemons_own_wait_is_kept() -> None:
    backoff = _retry.Backoff(jitter=lambda: 1.0)
    error = LimitExceeded("slow down", code="RESOURCE_EXHAUSTED", retry_after_s=7.0)
    assert backoff.next_delay_s(error) == 7.0


def test_waits_double_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_retry, "FIRST_DELAY_S", 0.25)
    monkeypatch.setattr(_retry, "LARGEST_DELAY_S", 10.0)
    backoff, error = _retry.Backoff(jitter=lambda: 1.0), Unavailable("x", code="UNAVAILABLE")
    assert [backoff.next_delay_s(error) for _ in range(8)] == [0.25, 0.5, 1, 2, 4, 8, 10, 10]
    backoff.reset()
    assert backoff.next_delay_s(error) == 0.25


# Jobs


def test_submitting_sends_the_data_and_names_it_by_id(gym: Gym, daemon: Daemon, spec_path: Path) -> None:
    job = gym.jobs.create(spec_path, ["train.epochs=2"], num_gpus=0, labels={"class": "7b"})
    assert (job.name, job.state, job.num_gpus, job.labels) == ("notes", JobState.QUEUED, 0, {"class": "7b"})
    assert job.spec.data.train[0].source == "file:file-1"
    assert job.spec.train.epochs == 2
    assert daemon.contents["file-1"] == (spec_path.parent / "rows.jsonl").read_bytes()


def test_a_wrong_specification_is_found_before_anything_is_sent(gym: Gym, daemon: Daemon, spec_path: Path) -> None:
    with pytest.raises(SpecError, match="did you mean learning_rate"):
        gym.jobs.create(spec_path, ["train.lerning_rate=1"])
    for change, message in {
        "data.train[0].source=nope.jsonl": "there is no file .*nope.jsonl",
        "data.train[0].source=.": "is a folder",
        "model.source=./my-model": "a path on this machine",
    }.items():
        with pytest.raises(UserError, match=message):
            gym.jobs.create(spec_path, [change])
    assert daemon.calls == []


def test_the_daemons_findings_come_as_violations(gym: Gym, daemon: Daemon) -> None:
    spec = {"model": {"source": "m"}, "data": {"train": [{"source": "file:1"}]}}
    daemon.fail(
        "CreateJob",
        Refusal(Code.INVALID_ARGUMENT, "SPEC_INVALID", "wrong", violations={"data.train[0].source": "no file 1"}),
    )
    with pytest.raises(InvalidRequest) as caught:
        gym.jobs.create(spec)
    assert caught.value.violations[0].field == "data.train[0].source"


def test_validating_queues_nothing(gym: Gym, daemon: Daemon, spec_path: Path) -> None:
    gym.jobs.validate(spec_path)
    assert daemon.jobs == {}
    assert daemon.files == {}


def train(daemon: Daemon, job_id: str, steps: int = 20) -> None:
    daemon.add_state(job_id, jobs_pb2.JOB_STATE_RUNNING)
    for step in range(1, steps + 1):
        daemon.add_loss(job_id, step, 1 / step)
    daemon.jobs[job_id].model_id = "notes-1"
    daemon.add_state(job_id, jobs_pb2.JOB_STATE_SUCCEEDED)


@pytest.mark.parametrize("break_after", [0, 1, 3, 7])
def test_a_follower_loses_and_doubles_no_event_across_breaks(
    gym: Gym, daemon: Daemon, spec_path: Path, break_after: int
) -> None:
    job = gym.jobs.create(spec_path)
    daemon.fail("WatchJobEvents", CUT, times=5, after_messages=break_after)
    trainer = threading.Thread(target=train, args=(daemon, job.id))
    trainer.start()
    events = list(job.events(follow=True))
    trainer.join()
    assert [event.sequence for event in events] == list(range(1, 24))
    assert [event.state for event in events if event.run is None] == [
        JobState.QUEUED,
        JobState.RUNNING,
        JobState.SUCCEEDED,
    ]
    losses = [event.run.values["loss"] for event in events if isinstance(event.run, MetricEvent)]
    assert losses == [1 / step for step in range(1, 21)]


def test_events_up_to_now_need_no_stream(gym: Gym, daemon: Daemon, spec_path: Path) -> None:
    job = gym.jobs.create(spec_path)
    daemon.add_state(job.id, jobs_pb2.JOB_STATE_RUNNING)
    daemon.add_loss(job.id, 1, 0.5)
    assert [event.sequence for event in job.events()] == [1, 2, 3]
    assert [event.sequence for event in job.events(after=2)] == [3]
    assert daemon.count("WatchJobEvents") == 0


def test_a_follower_gives_up_when_nobody_comes_back(base_url: str, daemon: Daemon, spec_path: Path) -> None:
    with Gym(base_url, api_key=KEY, patience_s=0.05) as gym:
        job = gym.jobs.create(spec_path)
        daemon.fail("WatchJobEvents", CUT, times=100_000)
        with pytest.raises(Unavailable):
            list(job.events(follow=True))
    assert daemon.count("WatchJobEvents") > 1


def test_a_follower_does_not_repeat_a_refusal(gym: Gym, daemon: Daemon) -> None:
    with pytest.raises(NotFound):
        list(gym.jobs.events("job-9", follow=True))
    assert daemon.count("WatchJobEvents") == 1


def test_waiting_returns_the_job_as_it_ended(gym: Gym, daemon: Daemon, spec_path: Path) -> None:
    job = gym.jobs.create(spec_path)
    trainer = threading.Thread(target=train, args=(daemon, job.id))
    trainer.start()
    done = job.wait(timeout_s=30)
    trainer.join()
    assert (done.state, done.model_id, done.progress.step) == (JobState.SUCCEEDED, "notes-1", 20)
    assert job.state is JobState.QUEUED


def test_waiting_for_a_job_that_failed_raises_with_its_reason(gym: Gym, daemon: Daemon, spec_path: Path) -> None:
    job = gym.jobs.create(spec_path)
    failure = daemon.jobs[job.id].failure
    failure.message, failure.hint, failure.exit_code = "out of memory", "set adapter.rank=8", -9
    failure.log_lines.append("CUDA error")
    daemon.add_state(job.id, jobs_pb2.JOB_STATE_FAILED)
    with pytest.raises(RunFailed) as caught:
        job.wait()
    assert str(caught.value) == f"job {job.id} failed: out of memory\nhint: set adapter.rank=8"
    ended = job.wait(check=False)
    assert ended.failure is not None
    assert (ended.failure.exit_code, ended.failure.log_lines) == (-9, ("CUDA error",))


def test_waiting_has_an_end(gym: Gym, spec_path: Path) -> None:
    with pytest.raises(TimedOut, match=r"is queued after 0\.01 s"):
        gym.jobs.create(spec_path).wait(timeout_s=0.01)


def test_a_jobs_life_is_steered(gym: Gym, daemon: Daemon, spec_path: Path) -> None:
    job = gym.jobs.create(spec_path)
    assert job.pause().state is JobState.PAUSED
    assert job.resume().state is JobState.QUEUED
    with pytest.raises(Conflict, match="it still runs\nhint: cancel it first"):
        job.delete()
    assert job.cancel().state is JobState.CANCELLED
    assert job.refresh().state is JobState.CANCELLED
    assert [each.id for each in gym.jobs.list(states=["cancelled"])] == [job.id]
    assert list(gym.jobs.list(states=[JobState.RUNNING])) == []
    (checkpoint,) = job.checkpoints()
    assert math.isnan(checkpoint.metrics["loss"])
    job.delete()
    assert daemon.jobs == {}


def test_logs_go_on_behind_the_last_line(gym: Gym, daemon: Daemon, spec_path: Path) -> None:
    job = gym.jobs.create(spec_path)
    daemon.logs[job.id] = "".join(f"zeile {number} ☃\n" for number in range(10)).encode()
    daemon.fail("WatchJobLog", CUT, times=3, after_messages=3)
    assert "".join(job.logs()) == daemon.logs[job.id].decode()


# Models, chat, keys


def test_models_are_registered_named_and_loaded(gym: Gym) -> None:
    base = gym.models.create_base("Qwen/Qwen3-8B", name="base")
    adapter = gym.models.create_adapter(base.id, {"adapter_config.json": "file-1"}, name="notes")
    assert (base.kind, adapter.kind, adapter.base_model_id) == (ModelKind.BASE, ModelKind.ADAPTER, "base")
    assert gym.models.load("notes").state is ModelState.LOADED
    assert gym.models.unload("notes").state is ModelState.AVAILABLE
    assert gym.models.set_alias("production", "notes").aliases == ("production",)
    assert gym.models.set_alias("production", "base").aliases == ("production",)
    assert gym.models.get("production").id == "base"
    assert gym.models.get("notes").aliases == ()
    gym.models.delete_alias("production")
    assert [model.id for model in gym.models.list(kind="adapter")] == ["notes"]
    gym.models.delete("notes")
    with pytest.raises(NotFound):
        gym.models.get("notes")


def test_chat_answers_whole_and_in_pieces(gym: Gym) -> None:
    whole = gym.chat.create("base", "to be or not")
    assert (whole.text, whole.model, whole.choices[0].finish_reason) == ("to be or not", "base@1", "stop")
    assert whole.usage is not None
    assert whole.usage.total_tokens == 11
    with gym.chat.stream("base", [{"role": "user", "content": "to be or not"}]) as stream:
        assert [chunk.text for chunk in stream] == ["to", " be", " or", " not", ""]
    assert stream.so_far().text == "to be or not"
    assert gym.chat.stream("base", "a b").collect().usage == gym.chat.create("base", "a b").usage
    assert gym.chat.count_tokens("base", "x") == 3


def test_closing_a_stream_ends_the_generation(gym: Gym, daemon: Daemon) -> None:
    with gym.chat.stream("base", "talk for ever") as stream:
        for chunk in stream:
            if chunk.text == " on":
                break
    assert daemon.cancelled.wait(timeout=30)


def test_a_stream_that_fails_in_the_middle_raises(gym: Gym, daemon: Daemon) -> None:
    daemon.fail("StreamChatCompletion", Refusal(Code.INTERNAL, "INTERNAL", "the engine died"), after_messages=2)
    stream = gym.chat.stream("base", "a b c d")
    with pytest.raises(ServerFault, match="the engine died"):
        stream.collect()
    assert stream.so_far().text == "a b"
    assert daemon.count("StreamChatCompletion") == 1


def test_keys_are_made_listed_and_revoked(gym: Gym) -> None:
    key, secret = gym.keys.create("seat 7", quota=KeyQuota(max_running_jobs=0))
    assert (key.name, key.scope, secret) == ("seat 7", "user", "gym-secret-key-1")
    assert (key.quota.max_running_jobs, key.quota.max_queued_jobs) == (0, None)
    assert gym.keys.revoke(key.id).revoke_time is not None
    assert [each.id for each in gym.keys.list()] == ["key-1"]


# The asynchronous twin


@pytest.fixture
def grpc_url(daemon: Daemon) -> Iterator[str]:
    server, port = serve_grpc(daemon)
    yield f"grpc://127.0.0.1:{port}"
    server.stop(grace=None).wait(timeout=10)


def test_the_asynchronous_client_makes_the_whole_journey(
    base_url: str, daemon: Daemon, spec_path: Path, tmp_path: Path
) -> None:
    async def journey() -> None:
        gym = AsyncGym(base_url, api_key=KEY)
        async with gym:
            job = await gym.jobs.create(spec_path)
            daemon.fail("WatchJobEvents", CUT, times=2, after_messages=2)
            trainer = threading.Thread(target=train, args=(daemon, job.id))
            trainer.start()
            sequences = [event.sequence async for event in job.events(follow=True)]
            assert sequences == list(range(1, 24))
            trainer.join()
            done = await job.wait()
            daemon.add_artifact(job.id, {"a": b"1" * 2000})
            folder = await done.adapter.download(tmp_path / "adapter")
            assert (folder / "a").read_bytes() == b"1" * 2000
            answers = await asyncio.gather(*(gym.chat.create("base", f"hello {n}") for n in range(10)))
            assert [answer.text for answer in answers] == [f"hello {n}" for n in range(10)]
            async with gym.chat.stream("base", "talk for ever") as stream:
                async for chunk in stream:
                    if chunk.text == " on":
                        break
            assert await asyncio.to_thread(daemon.cancelled.wait, 30)
            assert [each.id async for each in gym.jobs.list()] == [job.id]
            with pytest.raises(NotFound):
                await gym.jobs.get("job-9")

    asyncio.run(journey())


def test_an_error_in_the_loop_over_a_stream_is_all_that_is_raised(base_url: str) -> None:
    faults: list[dict[str, object]] = []

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        async with AsyncGym(base_url, api_key=KEY) as gym:
            with contextlib.suppress(KeyError):
                async with gym.chat.stream("base", "a b c") as stream:
                    async for _ in stream:
                        raise KeyError
            gc.collect()
            await asyncio.sleep(0)

    asyncio.run(leave())
    gc.collect()
    assert faults == []


def test_a_client_may_be_made_outside_of_the_event_loop(grpc_url: str) -> None:
    gym = AsyncGym(grpc_url, api_key=KEY)

    async def ask() -> str:
        async with gym:
            return (await gym.server_info()).version

    assert asyncio.run(ask()) == "0.1.0"


def test_one_client_serves_many_threads(grpc_url: str) -> None:
    with Gym(grpc_url, api_key=KEY) as gym:
        answers: dict[int, str] = {}

        def ask(number: int) -> None:
            answers[number] = gym.chat.create("base", f"n {number}").text

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {number: f"n {number}" for number in range(8)}
