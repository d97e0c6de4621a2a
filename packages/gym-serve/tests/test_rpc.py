"""Guards gym.v1 over gRPC and over Connect: jobs, files, models, inference, keys; rich errors; reflection; health."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from daemon_process import DaemonProcess
from grpc_health.v1 import health_pb2, health_pb2_grpc
from model_folder import write_adapter_folder
from rpc_client import RpcClient, details

from gym_sdk._proto.gym.v1 import files_pb2, inference_pb2, jobs_pb2, models_pb2, server_pb2

ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
ROWS = (json.dumps(ROW) + "\n").encode() * 3


@pytest.fixture
def daemon(shared_daemon: DaemonProcess) -> DaemonProcess:
    return shared_daemon


@pytest.fixture
def rpc(daemon: DaemonProcess) -> Iterator[RpcClient]:
    with RpcClient(daemon.grpc_address, daemon.key) as client:
        yield client


def upload(rpc: RpcClient, content: bytes, name: str = "rows.jsonl", purpose: int = files_pb2.FILE_PURPOSE_DATASET):
    created = rpc.call(
        "FileService",
        "CreateUpload",
        files_pb2.CreateUploadRequest(
            filename=name, purpose=purpose, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
        ),
    )
    if created.WhichOneof("result") == "file":
        return created.file
    chunk = files_pb2.UploadChunkRequest(upload_id=created.upload.id, offset_bytes=0, data=content)
    rpc.call("FileService", "UploadChunk", chunk)
    request = files_pb2.CompleteUploadRequest(upload_id=created.upload.id)
    return rpc.call("FileService", "CompleteUpload", request).file


def spec_json(name: str, file_id: str) -> str:
    return json.dumps({"name": name, "model": {"source": "tiny"}, "data": {"train": [{"source": f"file:{file_id}"}]}})


def create_job(rpc: RpcClient, name: str, **options: object) -> jobs_pb2.Job:
    file = upload(rpc, ROWS)
    request = jobs_pb2.CreateJobRequest(spec_json=spec_json(name, file.id), spec_version=1, **options)  # type: ignore[arg-type]
    return rpc.call("JobService", "CreateJob", request).job


def watch(rpc: RpcClient, job_id: str, after: int = 0) -> list[jobs_pb2.JobEvent]:
    stream = rpc.stream(
        "JobService", "WatchJobEvents", jobs_pb2.WatchJobEventsRequest(job_id=job_id, after_sequence=after)
    )
    return [event for response in stream for event in response.events]


def test_health_is_open_and_reflection_names_every_service(daemon: DaemonProcess, rpc: RpcClient) -> None:
    channel = grpc.insecure_channel(daemon.grpc_address)
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("", "gym.v1.JobService", "gym.v1.InferenceService"):
        status = stub.Check(health_pb2.HealthCheckRequest(service=name)).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    assert rpc.reflect() == sorted(
        [
            *(f"gym.v1.{name}Service" for name in ("File", "Inference", "Job", "Key", "Model", "Server")),
            *("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"),
        ]
    )


def test_a_job_from_its_file_to_its_model(rpc: RpcClient) -> None:
    job = create_job(rpc, "steps-4", labels={"seat": "12"}, request_id="r-1")
    assert job.state == jobs_pb2.JOB_STATE_QUEUED
    assert create_job(rpc, "steps-4", labels={"seat": "12"}, request_id="r-1").id == job.id
    events = watch(rpc, job.id)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert [event.job_state.state for event in events if event.HasField("job_state")] == [
        jobs_pb2.JOB_STATE_QUEUED,
        jobs_pb2.JOB_STATE_STARTING,
        jobs_pb2.JOB_STATE_RUNNING,
        jobs_pb2.JOB_STATE_SUCCEEDED,
    ]
    assert watch(rpc, job.id, after=5) == events[5:]
    job = rpc.call("JobService", "GetJob", jobs_pb2.GetJobRequest(job_id=job.id)).job
    assert (job.state, job.progress.step, job.last_sequence) == (jobs_pb2.JOB_STATE_SUCCEEDED, 4, len(events))
    assert hashlib.sha256(job.spec_json.encode()).hexdigest() == job.spec_sha256
    model = rpc.call("ModelService", "GetModel", models_pb2.GetModelRequest(model_id=job.model_id)).model
    assert (model.kind, model.state) == (models_pb2.MODEL_KIND_ADAPTER, models_pb2.MODEL_STATE_LOADED)
    assert (model.base_model_id, model.lineage.job_id, model.lineage.spec_sha256) == ("tiny", job.id, job.spec_sha256)
    assert model.source == "", "a path of the machine is nobody's business"
    artifacts = rpc.call("JobService", "ListJobArtifacts", jobs_pb2.ListJobArtifactsRequest(job_id=job.id)).artifacts
    adapter = next(artifact for artifact in artifacts if artifact.kind == "adapter")
    names = {file.path: file for file in adapter.files}
    assert set(names) == {"adapter_config.json", "adapter_model.safetensors"}
    stream = rpc.stream(
        "FileService",
        "DownloadFile",
        files_pb2.DownloadFileRequest(file_id=names["adapter_config.json"].file_id, offset_bytes=3),
    )
    first, *rest = list(stream)
    content = b"".join(response.data for response in rest)
    assert first.file.sha256 == names["adapter_config.json"].sha256
    assert json.loads(b'{"p' + content)["word"] == "tuned"
    page = rpc.call("JobService", "ListJobEvents", jobs_pb2.ListJobEventsRequest(job_id=job.id, page_size=2))
    assert [event.sequence for event in page.events] == [1, 2]
    page = rpc.call(
        "JobService",
        "ListJobEvents",
        jobs_pb2.ListJobEventsRequest(job_id=job.id, page_size=2, page_token=page.next_page_token),
    )
    assert [event.sequence for event in page.events] == [3, 4]
    checkpoints = rpc.call(
        "JobService", "ListJobCheckpoints", jobs_pb2.ListJobCheckpointsRequest(job_id=job.id)
    ).checkpoints
    assert [checkpoint.step for checkpoint in checkpoints] == [4, 3, 2, 1]
    assert checkpoints[0].metrics["loss"].number == 0.25


def test_the_log_of_a_job_is_followed_to_its_end(rpc: RpcClient) -> None:
    job = create_job(rpc, "fails")
    stream = rpc.stream("JobService", "WatchJobLog", jobs_pb2.WatchJobLogRequest(job_id=job.id, follow=True))
    assert "".join(response.text for response in stream) == "error: the loss was not a number at step 1\n"
    job = rpc.call("JobService", "GetJob", jobs_pb2.GetJobRequest(job_id=job.id)).job
    assert (job.state, job.failure.exit_code) == (jobs_pb2.JOB_STATE_FAILED, 1)
    assert list(job.failure.log_lines) == ["error: the loss was not a number at step 1"]


def test_validate_only_checks_and_queues_nothing(rpc: RpcClient) -> None:
    before = len(rpc.call("JobService", "ListJobs", jobs_pb2.ListJobsRequest(page_size=1000)).jobs)
    job = create_job(rpc, "steps-1", validate_only=True)
    assert job.id == ""
    assert len(rpc.call("JobService", "ListJobs", jobs_pb2.ListJobsRequest(page_size=1000)).jobs) == before


def test_lists_come_in_pages_that_belong_to_their_filters(rpc: RpcClient) -> None:
    ids = [create_job(rpc, "steps-1", labels={"group": "pages"}).id for _ in range(5)]
    found: list[str] = []
    token = ""
    while True:
        request = jobs_pb2.ListJobsRequest(page_size=2, page_token=token, labels={"group": "pages"})
        page = rpc.call("JobService", "ListJobs", request)
        found += [job.id for job in page.jobs]
        token = page.next_page_token
        if not token:
            break
    assert found == list(reversed(ids))
    page = rpc.call("JobService", "ListJobs", jobs_pb2.ListJobsRequest(page_size=2, labels={"group": "pages"}))
    with pytest.raises(grpc.RpcError) as wrong:
        rpc.call("JobService", "ListJobs", jobs_pb2.ListJobsRequest(page_token=page.next_page_token))
    assert details(wrong.value)[0] == "INVALID_ARGUMENT"


def test_a_specification_may_name_the_base_model_as_the_daemon_was_given_it(rpc: RpcClient) -> None:
    base = rpc.call("ModelService", "GetModel", models_pb2.GetModelRequest(model_id="tiny")).model
    spec = json.loads(spec_json("steps-1", upload(rpc, ROWS).id)) | {"model": {"source": base.source}}
    request = jobs_pb2.CreateJobRequest(spec_json=json.dumps(spec), spec_version=1)
    assert base.source != base.id
    assert json.loads(rpc.call("JobService", "CreateJob", request).job.spec_json)["model"]["source"] == base.source


def test_a_wrong_specification_is_refused_with_every_field(rpc: RpcClient) -> None:
    spec = {"model": {"source": "tiny"}, "data": {"train": [{"source": "/etc/passwd"}]}, "train": {"epochz": 1}}
    with pytest.raises(grpc.RpcError) as refused:
        rpc.call("JobService", "CreateJob", jobs_pb2.CreateJobRequest(spec_json=json.dumps(spec), spec_version=1))
    code, info, violations = details(refused.value)
    assert (code, info.reason, info.domain) == ("INVALID_ARGUMENT", "SPEC_INVALID", "gym")
    assert violations == [("train.epochz", "unknown key; did you mean epochs?")]


@pytest.mark.parametrize(
    ("service", "method", "request_", "code", "reason"),
    [
        ("JobService", "GetJob", jobs_pb2.GetJobRequest(job_id="job-0"), "NOT_FOUND", "JOB_NOT_FOUND"),
        ("FileService", "GetFile", files_pb2.GetFileRequest(file_id="x"), "NOT_FOUND", "FILE_NOT_FOUND"),
        ("FileService", "GetUpload", files_pb2.GetUploadRequest(upload_id="x"), "NOT_FOUND", "UPLOAD_NOT_FOUND"),
        ("ModelService", "GetModel", models_pb2.GetModelRequest(model_id="x"), "NOT_FOUND", "MODEL_NOT_FOUND"),
        ("KeyService", "RevokeKey", server_pb2.RevokeKeyRequest(key_id="x"), "NOT_FOUND", "KEY_NOT_FOUND"),
        ("ModelService", "CreateModel", models_pb2.CreateModelRequest(), "INVALID_ARGUMENT", "REQUEST_INVALID"),
        ("FileService", "CreateUpload", files_pb2.CreateUploadRequest(), "INVALID_ARGUMENT", "REQUEST_INVALID"),
    ],
)
def test_errors_are_rich(rpc: RpcClient, service: str, method: str, request_: object, code: str, reason: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        rpc.call(service, method, request_)  # type: ignore[arg-type]
    got, info, _ = details(refused.value)
    assert (got, info.reason) == (code, reason)
    assert dict(refused.value.trailing_metadata())["x-request-id"].startswith("req_")


def chat(content: str, **sampling: object) -> inference_pb2.ChatCompletionInput:
    message = inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_USER)
    message.parts.add(text=content)
    return inference_pb2.ChatCompletionInput(
        model="tiny",
        messages=[message],
        sampling=inference_pb2.SamplingParameters(**sampling),  # type: ignore[arg-type]
    )


def test_chat_whole_and_streamed(rpc: RpcClient) -> None:
    whole = rpc.call(
        "InferenceService",
        "CreateChatCompletion",
        inference_pb2.CreateChatCompletionRequest(input=chat("say:hello", n=2, top_logprobs=1)),
    )
    assert [choice.message.parts[0].text for choice in whole.choices] == ["hello", "hello"]
    assert whole.choices[0].finish_reason == inference_pb2.FINISH_REASON_STOP
    assert whole.choices[0].logprobs[0].chosen.token == "h"
    assert whole.model_id == "tiny"
    assert whole.usage.completion_tokens == 2 * 6
    pieces = list(
        rpc.stream(
            "InferenceService",
            "StreamChatCompletion",
            inference_pb2.StreamChatCompletionRequest(input=chat("say:hello")),
        )
    )
    assert "".join(choice.text for piece in pieces for choice in piece.choices) == "hello"
    assert pieces[-1].usage.completion_tokens == 6
    assert pieces[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    tokens = rpc.call("InferenceService", "TokenizeChat", inference_pb2.TokenizeChatRequest(input=chat("say:hello")))
    assert len(tokens.token_ids) == whole.usage.prompt_tokens
    assert tokens.text == "<|im_start|>user\nsay:hello<|im_end|>\n<|im_start|>assistant\n"


def test_completions_and_too_long_prompts(rpc: RpcClient) -> None:
    given = inference_pb2.CompletionInput(
        model="tiny", text="user\nsay:more", sampling=inference_pb2.SamplingParameters(max_tokens=2), echo=True
    )
    whole = rpc.call("InferenceService", "CreateCompletion", inference_pb2.CreateCompletionRequest(input=given))
    assert whole.choices[0].text == "user\nsay:moremo"
    assert whole.choices[0].finish_reason == inference_pb2.FINISH_REASON_LENGTH
    with pytest.raises(grpc.RpcError) as long:
        rpc.call(
            "InferenceService",
            "CreateChatCompletion",
            inference_pb2.CreateChatCompletionRequest(input=chat("x" * 5000)),
        )
    code, info, _ = details(long.value)
    assert (code, info.reason) == ("INVALID_ARGUMENT", "CONTEXT_TOO_LONG")


def test_an_uploaded_adapter_becomes_a_model_with_an_alias(rpc: RpcClient, tmp_path: Path) -> None:
    folder = write_adapter_folder(tmp_path / "adapter", "uploaded")
    files = [
        models_pb2.AdapterFile(
            name=path.name, file_id=upload(rpc, path.read_bytes(), path.name, files_pb2.FILE_PURPOSE_ADAPTER).id
        )
        for path in folder.iterdir()
    ]
    source = models_pb2.AdapterSource(base_model_id="tiny", files=files)
    model = rpc.call("ModelService", "CreateModel", models_pb2.CreateModelRequest(name="mine", adapter=source)).model
    rpc.call("ModelService", "SetModelAlias", models_pb2.SetModelAliasRequest(model_id=model.id, alias="production"))
    given = chat("who")
    given.model = "production"
    answer = rpc.call(
        "InferenceService", "CreateChatCompletion", inference_pb2.CreateChatCompletionRequest(input=given)
    )
    assert (answer.choices[0].message.parts[0].text, answer.model_id) == ("uploaded", model.id)
    rpc.call("ModelService", "UnloadModel", models_pb2.UnloadModelRequest(model_id=model.id))
    rpc.call("ModelService", "DeleteModel", models_pb2.DeleteModelRequest(model_id="production"))
    with pytest.raises(grpc.RpcError):
        rpc.call("ModelService", "GetModel", models_pb2.GetModelRequest(model_id="production"))


@pytest.mark.parametrize("name", ["adapter_model.bin", "../adapter_config.json", "a/b.json", "model.py"])
def test_an_adapters_files_are_plain_and_never_a_pickle(rpc: RpcClient, name: str) -> None:
    file = upload(rpc, b"content of " + name.encode(), "file", files_pb2.FILE_PURPOSE_ADAPTER)
    source = models_pb2.AdapterSource(base_model_id="tiny", files=[models_pb2.AdapterFile(name=name, file_id=file.id)])
    with pytest.raises(grpc.RpcError) as refused:
        rpc.call("ModelService", "CreateModel", models_pb2.CreateModelRequest(adapter=source))
    assert details(refused.value)[1].reason == "ADAPTER_INVALID"


def test_uploads_go_on_by_offset_and_are_checked(rpc: RpcClient) -> None:
    content = b"".join(f"line {n}\n".encode() for n in range(1000))
    sha256 = hashlib.sha256(content).hexdigest()
    request = files_pb2.CreateUploadRequest(
        request_id="u-1",
        filename="lines.txt",
        purpose=files_pb2.FILE_PURPOSE_ADAPTER,
        size_bytes=len(content),
        sha256=sha256,
    )
    started = rpc.call("FileService", "CreateUpload", request).upload

    def send(offset: int, data: bytes) -> int:
        return rpc.call(
            "FileService",
            "UploadChunk",
            files_pb2.UploadChunkRequest(upload_id=started.id, offset_bytes=offset, data=data),
        ).received_bytes

    assert send(0, content[:500]) == 500
    assert send(0, content[:500]) == 500, "what is here already has no effect"
    assert send(400, content[400:600]) == 600
    with pytest.raises(grpc.RpcError) as gap:
        send(700, content[700:800])
    code, info, _ = details(gap.value)
    assert (code, info.reason, info.metadata["received_bytes"]) == ("OUT_OF_RANGE", "OFFSET_MISMATCH", "600")
    assert rpc.call("FileService", "CreateUpload", request).upload.received_bytes == 600, "found by its request id"
    with pytest.raises(grpc.RpcError) as early:
        rpc.call("FileService", "CompleteUpload", files_pb2.CompleteUploadRequest(upload_id=started.id))
    assert details(early.value)[1].reason == "WRONG_STATE"
    send(600, content[600:])
    complete = files_pb2.CompleteUploadRequest(upload_id=started.id)
    file = rpc.call("FileService", "CompleteUpload", complete).file
    assert (file.sha256, file.size_bytes) == (sha256, len(content))
    assert rpc.call("FileService", "CompleteUpload", complete).file == file, "completing again gives the same"


def test_a_wrong_checksum_is_refused_and_leaves_nothing(daemon: DaemonProcess, rpc: RpcClient) -> None:
    request = files_pb2.CreateUploadRequest(
        filename="x", purpose=files_pb2.FILE_PURPOSE_ADAPTER, size_bytes=4, sha256="0" * 64
    )
    started = rpc.call("FileService", "CreateUpload", request).upload
    rpc.call("FileService", "UploadChunk", files_pb2.UploadChunkRequest(upload_id=started.id, data=b"abcd"))
    blobs = sorted((daemon.data_dir / "blobs").rglob("*"))
    with pytest.raises(grpc.RpcError) as refused:
        rpc.call("FileService", "CompleteUpload", files_pb2.CompleteUploadRequest(upload_id=started.id))
    code, info, _ = details(refused.value)
    assert (code, info.reason) == ("DATA_LOSS", "CHECKSUM_MISMATCH")
    assert sorted((daemon.data_dir / "blobs").rglob("*")) == blobs
    assert not (daemon.data_dir / "incoming" / started.id).exists()


def test_keys_are_made_listed_and_revoked(daemon: DaemonProcess, rpc: RpcClient) -> None:
    made = rpc.call(
        "KeyService",
        "CreateKey",
        server_pb2.CreateKeyRequest(
            name="seat 7", scope=server_pb2.KEY_SCOPE_USER, quota=server_pb2.KeyQuota(max_queued_jobs=0)
        ),
    )
    with RpcClient(daemon.grpc_address, made.secret) as own:
        info = own.call("ServerService", "GetServerInfo", server_pb2.GetServerInfoRequest())
        assert (info.scope, info.key_id) == (server_pb2.KEY_SCOPE_USER, made.key.id)
        with pytest.raises(grpc.RpcError) as denied:
            own.call("KeyService", "ListKeys", server_pb2.ListKeysRequest())
        assert details(denied.value)[:1] == ("PERMISSION_DENIED",)
        with pytest.raises(grpc.RpcError) as full:
            create_job(own, "steps-1")
        assert details(full.value)[1].reason == "QUOTA_EXCEEDED"
        rpc.call("KeyService", "RevokeKey", server_pb2.RevokeKeyRequest(key_id=made.key.id))
        with pytest.raises(grpc.RpcError) as gone:
            own.call("ServerService", "GetServerInfo", server_pb2.GetServerInfoRequest())
        assert details(gone.value)[1].reason == "KEY_INVALID"
    keys = rpc.call("KeyService", "ListKeys", server_pb2.ListKeysRequest()).keys
    assert next(key for key in keys if key.id == made.key.id).HasField("revoke_time")
    assert made.secret not in (daemon.data_dir / "gym.db").read_bytes().decode("latin-1")
    assert made.secret not in daemon.log


def test_the_same_over_http_by_connect(daemon: DaemonProcess, rpc: RpcClient) -> None:
    job = create_job(rpc, "steps-2")
    watch(rpc, job.id)
    with daemon.http() as http:
        proto = http.post(
            "/gym.v1.JobService/GetJob",
            content=jobs_pb2.GetJobRequest(job_id=job.id).SerializeToString(),
            headers={"content-type": "application/proto"},
        )
        assert jobs_pb2.GetJobResponse.FromString(proto.content).job.state == jobs_pb2.JOB_STATE_SUCCEEDED
        as_json = http.post("/gym.v1.JobService/GetJob", json={"jobId": job.id})
        assert as_json.json()["job"]["state"] == "JOB_STATE_SUCCEEDED"
        missing = http.post("/gym.v1.JobService/GetJob", json={"jobId": "job-0"})
        assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
        assert missing.json()["details"][0]["type"] == "google.rpc.ErrorInfo"
        request = jobs_pb2.WatchJobEventsRequest(job_id=job.id).SerializeToString()
        body = connect_stream(http, "/gym.v1.JobService/WatchJobEvents", request)
        messages = [jobs_pb2.WatchJobEventsResponse.FromString(data) for flags, data in body if flags == 0]
        assert [event for message in messages for event in message.events] == watch(rpc, job.id)
        assert json.loads(body[-1][1]) == {}
        request = jobs_pb2.WatchJobEventsRequest(job_id="job-0").SerializeToString()
        body = connect_stream(http, "/gym.v1.JobService/WatchJobEvents", request)
        assert json.loads(body[-1][1])["error"]["code"] == "not_found"
        assert http.post("/gym.v1.JobService/GetJob", content=b"x").status_code == 415


def connect_stream(http: httpx.Client, path: str, request: bytes) -> list[tuple[int, bytes]]:
    envelope = struct.pack(">BI", 0, len(request)) + request
    return connect_envelopes(
        http.post(path, content=envelope, headers={"content-type": "application/connect+proto"}).content
    )


def connect_envelopes(content: bytes) -> list[tuple[int, bytes]]:
    """A stream's messages, each with its flags."""
    found: list[tuple[int, bytes]] = []
    while content:
        flags, length = struct.unpack(">BI", content[:5])
        found.append((flags, content[5 : 5 + length]))
        content = content[5 + length :]
    return found
