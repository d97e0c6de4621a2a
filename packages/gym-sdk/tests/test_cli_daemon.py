"""Guards the commands that call a daemon: data on standard output, the rest on standard error, exit codes that tell."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from gym_sdk_fakes.daemon import KEY, Daemon
from gym_sdk_fakes.refusal import CUT, Code, Refusal
from gym_sdk_fakes.servers import serve_grpc

from gym_sdk._proto.gym.v1 import events_pb2, jobs_pb2
from gym_sdk.cli import _root
from gym_sdk.cli import chat as chat_module
from gym_sdk.cli._plot import plot

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def at_the_daemon(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The environment of someone who uses the fake daemon, in an empty folder."""
    server, port = serve_grpc(daemon)
    monkeypatch.setenv("GYM_BASE_URL", f"grpc://127.0.0.1:{port}")
    monkeypatch.setenv("GYM_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    yield
    server.stop(grace=None).wait(timeout=10)


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "rows.jsonl").write_bytes(b'{"messages": []}\n' * 10)
    (tmp_path / "run.yaml").write_text(
        "name: notes\nmodel: {source: Qwen/Qwen3-8B}\ndata: {train: [{source: rows.jsonl}]}\n"
    )
    return "run.yaml"


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = _root.run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def finish(daemon: Daemon, job_id: str, state: int = jobs_pb2.JOB_STATE_SUCCEEDED) -> None:
    daemon.add_state(job_id, jobs_pb2.JOB_STATE_RUNNING)
    for step in range(1, 4):
        daemon.add_loss(job_id, step, 1 / step)
    log = events_pb2.RunEvent(sequence=9)
    log.log.level, log.log.text = events_pb2.LOG_LEVEL_INFO, "saved the adapter"
    daemon.add_event(job_id, run=log)
    daemon.jobs[job_id].model_id = "notes-1"
    daemon.add_state(job_id, state)


def test_a_job_is_submitted_listed_and_shown(daemon: Daemon, spec: str, capsys: Capture) -> None:
    code, out, err = run(capsys, "jobs", "submit", spec, "train.epochs=2", "--label", "class=7b", "--gpus", "0")
    assert (code, out) == (0, "job-1\n")
    assert err == f"sent {Path('rows.jsonl').absolute()} (170 bytes)\nhint: gym jobs watch job-1\n"
    assert daemon.jobs["job-1"].resources.num_gpus == 0

    code, out, _ = run(capsys, "jobs", "list", "--label", "class=7b")
    assert out.splitlines()[0].split() == ["ID", "NAME", "STATE", "STEPS", "LOSS", "AGE"]
    assert out.splitlines()[1].split()[:3] == ["job-1", "notes", "queued"]
    assert run(capsys, "jobs", "list", "--state", "failed")[1:] == (
        "",
        "no jobs; `gym jobs submit run.yaml` makes one\n",
    )
    (listed,) = json.loads(run(capsys, "jobs", "list", "--json")[1])
    assert (listed["id"], listed["state"], listed["labels"]) == ("job-1", "queued", {"class": "7b"})

    code, out, err = run(capsys, "jobs", "get")
    assert err == "the newest job: job-1\n"
    assert "state    queued\n" in out
    assert "labels   class=7b\n" in out


def test_a_dry_run_queues_nothing(daemon: Daemon, spec: str, capsys: Capture) -> None:
    assert run(capsys, "jobs", "submit", spec, "--dry-run") == (0, "", "run.yaml is valid; nothing was queued\n")
    assert daemon.jobs == {}


def test_mistakes_are_exit_2(daemon: Daemon, spec: str, capsys: Capture) -> None:
    assert run(capsys, "jobs", "submit", spec, "train.epohcs=2") == (
        2,
        "",
        "error: command line: train.epohcs: unknown key; did you mean epochs?\nhint: gym explain train\n",
    )
    assert run(capsys, "jobs", "submit", spec, "--label", "x")[2] == (
        "error: 'x' is not a label\nhint: labels look like class=7b\n"
    )
    assert run(capsys, "jobs", "get", "job-9") == (
        2,
        "",
        "error: there is no job job-9\nhint: gym jobs list shows them\n",
    )
    assert run(capsys, "jobs", "watch") == (2, "", "error: there are no jobs yet\nhint: gym jobs submit run.yaml\n")
    assert run(capsys, "jobs", "list", "--state", "sleeping")[0] == 2
    assert daemon.jobs == {}


def test_watching_shows_the_end_and_tells_it_by_the_exit_code(daemon: Daemon, spec: str, capsys: Capture) -> None:
    run(capsys, "jobs", "submit", spec)
    daemon.fail("WatchJobEvents", CUT, times=2, after_messages=2)
    finish(daemon, "job-1")
    code, out, err = run(capsys, "jobs", "watch", "job-1")
    assert (code, out) == (0, "")
    assert "notes  running" in err
    assert "notes  succeeded  step 3  loss 0.3333\n" in err
    assert "saved the adapter\n" in err
    assert err.endswith(
        "job job-1 succeeded; its model is notes-1\nhint: gym chat notes-1, or gym jobs download job-1\n"
    )

    daemon.jobs["job-1"].failure.message = "out of memory"
    daemon.add_state("job-1", jobs_pb2.JOB_STATE_FAILED)
    code, _, err = run(capsys, "jobs", "watch", "job-1")
    assert code == 1
    assert err.endswith("job job-1 failed: out of memory\nhint: gym jobs logs job-1\n")


def test_watching_for_scripts_is_a_line_of_json_for_each_event(daemon: Daemon, spec: str, capsys: Capture) -> None:
    run(capsys, "jobs", "submit", spec)
    finish(daemon, "job-1")
    code, out, _ = run(capsys, "jobs", "watch", "job-1", "--json", "--after", "1")
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [event["sequence"] for event in events] == [2, 3, 4, 5, 6, 7]
    assert [event["kind"] for event in events] == ["job", "metric", "metric", "metric", "log", "job"]
    assert events[1]["run"]["values"] == {"loss": 1.0}


def test_watching_on_a_terminal_draws_the_curve(
    daemon: Daemon, spec: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_sdk.cli import console

    run(capsys, "jobs", "submit", spec)
    finish(daemon, "job-1")
    monkeypatch.setattr(console, "is_terminal", lambda: True)
    code, _, err = run(capsys, "jobs", "watch", "job-1")
    assert code == 0
    assert "loss\n" in err
    assert "0.3333" in err


def test_logs_are_data(daemon: Daemon, spec: str, capsys: Capture) -> None:
    run(capsys, "jobs", "submit", spec)
    daemon.logs["job-1"] = b"one\ntwo\n"
    assert run(capsys, "jobs", "logs", "job-1", "-f") == (0, "one\ntwo\n", "")


def test_a_job_is_steered(daemon: Daemon, spec: str, capsys: Capture) -> None:
    run(capsys, "jobs", "submit", spec)
    assert run(capsys, "jobs", "pause", "job-1")[2] == "job job-1 is paused\nhint: gym jobs resume job-1\n"
    assert run(capsys, "jobs", "resume", "job-1")[2] == "job job-1 is queued\n"
    assert run(capsys, "jobs", "delete", "job-1") == (2, "", "error: it still runs\nhint: cancel it first\n")
    assert run(capsys, "jobs", "cancel", "job-1")[2] == "job job-1 is cancelled\n"
    assert run(capsys, "jobs", "delete", "job-1")[2] == "job job-1 is deleted\n"


def test_a_result_is_fetched(daemon: Daemon, spec: str, capsys: Capture) -> None:
    run(capsys, "jobs", "submit", spec)
    daemon.add_artifact("job-1", {"adapter_model.safetensors": b"x" * 3000})
    code, out, err = run(capsys, "jobs", "download", "job-1")
    assert (code, out) == (0, "adapter-job-1\n")
    assert (Path("adapter-job-1") / "adapter_model.safetensors").read_bytes() == b"x" * 3000
    assert err.splitlines()[-1].startswith("adapter of job-1: 3.0/3.0 kB, took ")
    assert run(capsys, "jobs", "download", "job-1", "--kind", "model")[0] == 2


def test_files_are_sent_listed_fetched_and_deleted(daemon: Daemon, spec: str, capsys: Capture) -> None:
    code, out, err = run(capsys, "files", "upload", "rows.jsonl")
    assert (code, out) == (0, "file-1\n")
    assert "rows.jsonl: 10 rows, openai\n" in err
    assert run(capsys, "files", "list")[1].splitlines()[1].split()[:3] == ["file-1", "rows.jsonl", "dataset"]
    assert "rows     10 (openai)\n" in run(capsys, "files", "get", "file-1")[1]
    code, out, _ = run(capsys, "files", "download", "file-1", "back.jsonl")
    assert (code, out) == (0, "back.jsonl\n")
    assert Path("back.jsonl").read_bytes() == Path("rows.jsonl").read_bytes()
    assert run(capsys, "files", "delete", "file-1") == (0, "", "file file-1 is deleted\n")
    assert run(capsys, "files", "upload")[0] == 2
    assert run(capsys, "files", "upload", "nope")[2] == "error: nope: there is no such file\n"


def test_models_are_added_named_and_loaded(daemon: Daemon, capsys: Capture, tmp_path: Path) -> None:
    assert run(capsys, "models", "add", "Qwen/Qwen3-8B", "--name", "base")[1] == "base\n"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    assert (
        run(capsys, "models", "add", "adapter", "--base", "base")[2] == "error: adapter: has no adapter_config.json\n"
    )
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.bin").write_bytes(b"pickle")
    assert "pickle files are not taken" in run(capsys, "models", "add", "adapter", "--base", "base")[2]
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    assert run(capsys, "models", "add", "adapter", "--base", "base", "--name", "notes")[1] == "notes\n"
    assert sorted(file.filename for file in daemon.files.values()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert run(capsys, "models", "load", "notes")[2] == "model notes is loaded\n"
    assert run(capsys, "models", "alias", "production", "notes")[2] == "production means notes now\n"
    assert run(capsys, "models", "list", "--kind", "adapter")[1].splitlines()[1].split()[:4] == [
        "notes",
        "adapter",
        "loaded",
        "base",
    ]
    assert "aliases  production\n" in run(capsys, "models", "get", "production")[1]
    assert run(capsys, "models", "alias", "production")[2] == "production means nothing now\n"
    assert run(capsys, "models", "unload", "notes")[2] == "model notes is available\n"
    assert run(capsys, "models", "delete", "notes")[2] == "model notes is deleted\n"


def test_a_key_is_printed_once(daemon: Daemon, capsys: Capture) -> None:
    code, out, err = run(capsys, "keys", "create", "seat 7", "--max-storage-gb", "1.5")
    assert (code, out) == (0, "gym-secret-key-1\n")
    assert "cannot be shown again" in err
    assert daemon.keys["key-1"].quota.max_storage_bytes == 1_500_000_000
    assert "gym-secret" not in run(capsys, "keys", "list")[1]
    assert run(capsys, "keys", "revoke", "key-1")[2] == "key key-1 is revoked\n"
    assert "revoked" in run(capsys, "keys", "list")[1]


# Chat


def test_a_question_to_a_daemons_model_is_answered(capsys: Capture) -> None:
    assert run(capsys, "chat", "base", "to be or not") == (0, "to be or not\n", "")


def test_a_question_may_come_on_standard_input(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    assert run(capsys, "chat", "base") == (0, "from a pipe\n", "")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run(capsys, "chat", "base")[0] == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def converse(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("".join(f"{line}\n" for line in lines)))


def test_a_chat_remembers_its_turns(daemon: Daemon, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    converse(monkeypatch, "one", "two", "/help", "three", "/reset", "four", "/quit", "never")
    code, out, err = run(capsys, "chat", "base", "--system", "Be brief.", "--temperature", "0")
    assert code == 0
    assert out.replace("> ", "") == "one\ntwo\nthree\nfour\n"
    asked = [r.input for r in daemon.requests if hasattr(r, "input")]
    assert [len(request.messages) for request in asked] == [2, 4, 6, 2]
    assert asked[0].messages[0].parts[0].text == "Be brief."
    assert asked[0].sampling.HasField("temperature")
    assert asked[2].messages[3].parts[0].text == "two"
    assert err.count("/reset begins anew") == 2


def test_one_failed_answer_does_not_end_the_chat(
    daemon: Daemon, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    converse(monkeypatch, "one", "two")
    daemon.fail("StreamChatCompletion", Refusal(Code.INTERNAL, "INTERNAL", "the engine died"))
    code, out, err = run(capsys, "chat", "base")
    assert (code, out.replace("> ", "")) == (0, "two\n")
    assert "error: the engine died" in err
    asked = [r.input for r in daemon.requests if hasattr(r, "input")]
    assert [message.parts[0].text for message in asked[-1].messages] == ["two"]


class OpenAIServer(BaseHTTPRequestHandler):
    requests: list[dict[str, Any]] = []
    fail = False

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_GET(self) -> None:
        self.answer(200, json.dumps({"data": [{"id": "only-one"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.requests.append({"key": self.headers.get("authorization"), **body})
        if body["model"] == "nope":
            self.answer(404, json.dumps({"error": {"message": "no such model"}}).encode())
            return
        pieces = [{"choices": [{"delta": {"content": piece}}]} for piece in ("Grüße", "!")]
        if body["messages"][-1]["content"] == "fail":
            pieces[1] = {"error": {"message": "it broke"}}
        events = [": a comment", "", *(f"data: {json.dumps(piece)}\n" for piece in pieces), "data: [DONE]", ""]
        self.answer(200, "\n".join(events).encode())

    def answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def openai_url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), OpenAIServer)
    OpenAIServer.requests = []
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_any_openai_compatible_address_is_talked_to(
    openai_url: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_KEY", "sk-1")
    assert run(capsys, "chat", openai_url, "hi", "--seed", "0") == (0, "Grüße!\n", "")
    sent = OpenAIServer.requests[0]
    assert (sent["model"], sent["seed"], sent["key"]) == ("only-one", 0, None)
    assert "temperature" not in sent
    run(capsys, "chat", openai_url, "hi", "--model", "m", "--api-key-env", "OTHER_KEY")
    assert OpenAIServer.requests[1]["key"] == "Bearer sk-1"
    assert run(capsys, "chat", openai_url, "hi", "--model", "nope") == (2, "", "error: HTTP 404: no such model\n")
    assert run(capsys, "chat", openai_url, "fail") == (1, "Grüße", "error: it broke\n")
    assert run(capsys, "chat", openai_url, "hi", "--api-key-env", "NO_SUCH_KEY")[0] == 2
    assert run(capsys, "chat", "base", "hi", "--model", "m")[0] == 2


def test_a_model_on_this_machine_is_opened_by_who_can(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_sdk.cli import _chat_backends

    (tmp_path / "run").mkdir()
    monkeypatch.setattr(_chat_backends, "_local_points", list)
    assert run(capsys, "chat", "run", "hi") == (
        2,
        "",
        "error: chatting with a model on this machine needs gym-serve[torch], which is not installed\n"
        'hint: pip install "gym-serve[torch]"\n',
    )

    closed = []

    class Local:
        model = "a run"
        system: str | None = None

        def stream(self, messages: list[dict[str, str]], **sampling: object) -> Iterator[str]:
            yield " ".join([*(turn["content"] for turn in messages), str(sampling["max_tokens"])])

        def close(self) -> None:
            closed.append(True)

    class Point:
        def load(self) -> object:
            return lambda target: Local()

    monkeypatch.setattr(_chat_backends, "_local_points", lambda: [Point()])
    assert run(capsys, "chat", "run", "hi", "--max-tokens", "5") == (0, "hi 5\n", "")
    assert run(capsys, "chat", "run", "hi") == (0, "hi 1024\n", "")
    Local.system = "Answer in rhyme."
    told = "with the system message of its training (--system TEXT for another): Answer in rhyme.\n"
    assert run(capsys, "chat", "run", "hi") == (0, "Answer in rhyme. hi 1024\n", told)
    assert run(capsys, "chat", "run", "hi", "--system", "") == (0, "hi 1024\n", "")
    assert run(capsys, "chat", "run", "hi", "--system", "Be short.") == (0, "Be short. hi 1024\n", "")
    for missing in ("./nope", "runs/nope"):
        assert f"error: {missing}: there is no such run, folder or file\n" in run(capsys, "chat", missing, "hi")[2]
    assert closed == [True] * 5
    assert chat_module.ChatBackend is _chat_backends.ChatBackend


def test_the_curve_of_a_loss_is_drawn() -> None:
    points = [(float(step), 1.0 - step / 10) for step in range(11)] + [(5.5, float("nan"))]
    lines = plot(points, width=20, height=3, unicode=False)
    assert len(lines) == 3
    assert lines[0].startswith("1 *")
    assert lines[2].startswith("0 ")
    braille = plot(points, width=20, height=3)
    assert all(len(line) <= 20 for line in braille)
    assert any("\u2801" <= character <= "\u28ff" for character in braille[0])
    assert plot([], 20, 3) == []
    assert plot([(1.0, 2.0)], 20, 3) != []
