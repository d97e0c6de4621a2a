"""Guards pushing to a hub: the run's own files arrive, whole, where a person said; every refusal is one message."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gym_sdk.errors import UserError
from gym_sdk.rundir import RunDir
from gym_sdk.spec import dump_yaml, spec_from_data
from gym_trainer.exporting.hub import push


class StandInHub(ThreadingHTTPServer):
    """As much of a hub's interface as a push calls, on loopback."""

    def __init__(self, refuse_with: int | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.refuse_with = refuse_with
        self.repositories: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        self.summary = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: StandInHub

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length) if length else self._chunks()
        if self.server.refuse_with is not None:
            self._answer({"error": "no"}, self.server.refuse_with)
        elif self.path == "/api/repos/create":
            made = json.loads(body)
            name = f"{made.get('organization') or 'someone'}/{made['name']}"
            self.server.repositories[name] = made
            self._answer({"url": f"{self.server.url}/{name}", "name": name})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            plain = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]
            self._answer({"files": plain})
        else:
            assert "/commit/" in self.path
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    self.server.summary = line["value"]["summary"]
                else:
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer({"commitUrl": f"{self.server.url}/someone/notes/commit/1", "commitOid": "1", "success": True})

    def do_GET(self) -> None:
        self._answer({"error": "not found"}, 404)

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline() or b"0", 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        return body

    def _answer(self, value: object, code: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[StandInHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_stand_in")
    with StandInHub(getattr(request, "param", None)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir.create(tmp_path / "runs", "notes")
    values = {"model": {"source": "m"}, "data": {"train": [{"source": "rows.jsonl"}]}, "name": "notes"}
    made.spec_path.write_text(dump_yaml(spec_from_data(values)))
    return made


FILES = {
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": bytes(range(256)) * 8,
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# notes\n",
}


def with_adapter(run: RunDir) -> Path:
    run.adapter_dir.mkdir()
    for name, data in FILES.items():
        (run.adapter_dir / name).write_bytes(data)
    return run.path


@pytest.mark.parametrize("public", [False, True])
def test_every_file_of_the_adapter_arrives_in_one_commit(run: RunDir, hub: StandInHub, public: bool) -> None:
    done = push(with_adapter(run), "someone/notes", public=public, endpoint=hub.url)
    assert hub.files == FILES
    asked = hub.repositories["someone/notes"]  # newer versions of the library say `visibility`
    assert asked.get("visibility", "private" if asked.get("private") else "public") == (
        "public" if public else "private"
    )
    assert hub.summary == "sft: notes"
    assert done.url == f"{hub.url}/someone/notes/commit/1"
    assert done.size_bytes == sum(map(len, FILES.values()))


@pytest.mark.parametrize("hub", [401, 403], indirect=True)
def test_a_hub_that_does_not_let_you_write_is_one_message_with_the_way_out(run: RunDir, hub: StandInHub) -> None:
    with pytest.raises(UserError, match="does not let you write to someone/notes") as error:
        push(with_adapter(run), "someone/notes", endpoint=hub.url)
    assert "hf auth login" in str(error.value.hint)


def test_a_hub_that_is_not_there_a_name_that_is_none_and_a_run_without_a_result(run: RunDir, hub: StandInHub) -> None:
    with pytest.raises(UserError, match="no result to push"):
        push(run.path, "someone/notes", endpoint=hub.url)
    path = with_adapter(run)
    with pytest.raises(UserError, match="not a repository's name"):
        push(path, "some one/no/tes", endpoint=hub.url)
    with pytest.raises(UserError, match="cannot be reached"):
        push(path, "someone/notes", endpoint="http://127.0.0.1:9")
    assert hub.files == {}


def test_nothing_is_sent_offline(run: RunDir, hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        push(with_adapter(run), "someone/notes", endpoint=hub.url)
    assert hub.repositories == {}
