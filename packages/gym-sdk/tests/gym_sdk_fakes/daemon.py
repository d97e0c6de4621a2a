"""A daemon of one process and no substance: the services of gym.v1 in memory.

It answers as proto/gym/v1 says, and fails on demand. What is tested against it is the client alone.
"""

# ruff: noqa: N802 - methods are named after their RPCs

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gym_sdk._proto.gym.v1 import events_pb2, files_pb2, inference_pb2, jobs_pb2, models_pb2, server_pb2
from gym_sdk.errors import SpecError
from gym_sdk.spec import parse_spec
from gym_sdk_fakes.refusal import Code, Refusal

KEY = "gym-test-key"


@dataclass
class Fault:
    """What a method does instead of answering; on a stream after so many messages."""

    refusal: Refusal
    times: int = 1
    after_messages: int = 0


@dataclass
class Daemon:
    """The state, the services, and the faults to come."""

    files: dict[str, files_pb2.File] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, files_pb2.Upload] = field(default_factory=dict)
    upload_of_request: dict[str, str] = field(default_factory=dict)
    received: dict[str, bytearray] = field(default_factory=dict)
    jobs: dict[str, jobs_pb2.Job] = field(default_factory=dict)
    job_of_request: dict[str, str] = field(default_factory=dict)
    events: dict[str, list[jobs_pb2.JobEvent]] = field(default_factory=dict)
    logs: dict[str, bytes] = field(default_factory=dict)
    artifacts: dict[str, list[jobs_pb2.JobArtifact]] = field(default_factory=dict)
    models: dict[str, models_pb2.Model] = field(default_factory=dict)
    keys: dict[str, server_pb2.Key] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)
    page_size: int = 2
    max_chunk_bytes: int = 1 << 20

    def fail(self, method: str, refusal: Refusal, *, times: int = 1, after_messages: int = 0) -> None:
        self.faults.setdefault(method, []).append(Fault(refusal, times, after_messages))

    def count(self, method: str) -> int:
        return self.calls.count(method)

    def fault(self, method: str) -> Fault | None:
        waiting = [fault for fault in self.faults.get(method, []) if fault.times > 0]
        if not waiting:
            return None
        waiting[0].times -= 1
        return waiting[0]

    # What tests do to the state

    def add_file(self, content: bytes, filename: str = "rows.jsonl") -> files_pb2.File:
        file = files_pb2.File(
            id=f"file-{len(self.files) + 1}",
            filename=filename,
            purpose=files_pb2.FILE_PURPOSE_DATASET,
            size_bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
        )
        file.create_time.GetCurrentTime()
        self.files[file.id], self.contents[file.id] = file, content
        return file

    def add_artifact(self, job_id: str, contents: dict[str, bytes]) -> None:
        made = jobs_pb2.JobArtifact(kind="adapter", size_bytes=sum(map(len, contents.values())))
        for path, content in contents.items():
            file = self.add_file(content, filename=path)
            made.files.add(path=path, file_id=file.id, size_bytes=file.size_bytes, sha256=file.sha256)
        self.artifacts[job_id] = [made]

    def add_event(self, job_id: str, **event: Any) -> jobs_pb2.JobEvent:
        with self.changed:
            events = self.events.setdefault(job_id, [])
            message = jobs_pb2.JobEvent(sequence=len(events) + 1, **event)
            message.time.GetCurrentTime()
            events.append(message)
            if message.WhichOneof("event") == "job_state":
                self.jobs[job_id].state = message.job_state.state
            self.jobs[job_id].last_sequence = message.sequence
            self.changed.notify_all()
            return message

    def add_state(self, job_id: str, state: int, message: str = "") -> None:
        self.add_event(job_id, job_state=jobs_pb2.JobStateEvent(state=state, message=message, attempt=1))  # pyright: ignore

    def add_loss(self, job_id: str, step: int, loss: float) -> None:
        run = events_pb2.RunEvent(sequence=step)
        run.time.GetCurrentTime()
        run.metric.step = step
        run.metric.values["loss"].number = loss
        self.jobs[job_id].progress.step = step
        self.add_event(job_id, run=run)

    def is_final(self, job_id: str) -> bool:
        return self.jobs[job_id].state in (
            jobs_pb2.JOB_STATE_SUCCEEDED,
            jobs_pb2.JOB_STATE_FAILED,
            jobs_pb2.JOB_STATE_CANCELLED,
        )

    # FileService

    def CreateUpload(self, request: files_pb2.CreateUploadRequest) -> files_pb2.CreateUploadResponse:
        for file in self.files.values():
            if file.sha256 == request.sha256 and file.purpose == request.purpose:
                return files_pb2.CreateUploadResponse(file=file)
        if (known := self.upload_of_request.get(request.request_id)) is not None:
            return files_pb2.CreateUploadResponse(upload=self.uploads[known])
        upload = files_pb2.Upload(
            id=f"upload-{len(self.uploads) + 1}",
            filename=request.filename,
            purpose=request.purpose,
            size_bytes=request.size_bytes,
            sha256=request.sha256,
            max_chunk_bytes=self.max_chunk_bytes,
        )
        self.uploads[upload.id], self.received[upload.id] = upload, bytearray()
        self.upload_of_request[request.request_id] = upload.id
        return files_pb2.CreateUploadResponse(upload=upload)

    def GetUpload(self, request: files_pb2.GetUploadRequest) -> files_pb2.GetUploadResponse:
        return files_pb2.GetUploadResponse(upload=self._upload(request.upload_id))

    def _upload(self, upload_id: str) -> files_pb2.Upload:
        if upload_id not in self.received:
            raise Refusal(Code.NOT_FOUND, "UPLOAD_NOT_FOUND", f"there is no upload {upload_id}")
        return self.uploads[upload_id]

    def UploadChunk(self, request: files_pb2.UploadChunkRequest) -> files_pb2.UploadChunkResponse:
        upload, received = self._upload(request.upload_id), self.received[request.upload_id]
        if len(request.data) > self.max_chunk_bytes:
            raise Refusal(Code.INVALID_ARGUMENT, "REQUEST_INVALID", "too large a chunk")
        if request.offset_bytes > len(received):
            raise Refusal(
                Code.OUT_OF_RANGE, "OFFSET_MISMATCH", "a gap", metadata={"received_bytes": str(len(received))}
            )
        received[request.offset_bytes :] = request.data
        upload.received_bytes = len(received)
        return files_pb2.UploadChunkResponse(received_bytes=len(received))

    def CompleteUpload(self, request: files_pb2.CompleteUploadRequest) -> files_pb2.CompleteUploadResponse:
        upload = self._upload(request.upload_id)
        content = bytes(self.received.pop(upload.id))
        if hashlib.sha256(content).hexdigest() != upload.sha256:
            raise Refusal(Code.DATA_LOSS, "CHECKSUM_MISMATCH", "another sha256")
        if b"BROKEN" in content:
            raise Refusal(
                Code.INVALID_ARGUMENT,
                "DATASET_INVALID",
                f"{upload.filename}:1: not JSON",
                violations={f"{upload.filename}:1": "not JSON"},
            )
        file = self.add_file(content, upload.filename)
        file.purpose = upload.purpose
        file.dataset.format, file.dataset.num_rows = "openai", content.count(b"\n")
        return files_pb2.CompleteUploadResponse(file=file)

    def CancelUpload(self, request: files_pb2.CancelUploadRequest) -> files_pb2.CancelUploadResponse:
        self.received.pop(request.upload_id, None)
        return files_pb2.CancelUploadResponse()

    def _file(self, file_id: str) -> files_pb2.File:
        if file_id not in self.files:
            raise Refusal(Code.NOT_FOUND, "FILE_NOT_FOUND", f"there is no file {file_id}")
        return self.files[file_id]

    def GetFile(self, request: files_pb2.GetFileRequest) -> files_pb2.GetFileResponse:
        return files_pb2.GetFileResponse(file=self._file(request.file_id))

    def ListFiles(self, request: files_pb2.ListFilesRequest) -> files_pb2.ListFilesResponse:
        wanted = [f for f in self.files.values() if request.purpose in (0, f.purpose)]
        page, token = self._page(list(reversed(wanted)), request.page_token)
        return files_pb2.ListFilesResponse(files=page, next_page_token=token)

    def _page(self, items: list[Any], token: str) -> tuple[list[Any], str]:
        start = int(token or 0)
        end = start + self.page_size
        return items[start:end], str(end) if end < len(items) else ""

    def DeleteFile(self, request: files_pb2.DeleteFileRequest) -> files_pb2.DeleteFileResponse:
        self._file(request.file_id)
        del self.files[request.file_id]
        return files_pb2.DeleteFileResponse()

    def DownloadFile(self, request: files_pb2.DownloadFileRequest) -> Iterator[files_pb2.DownloadFileResponse]:
        file, offset = self._file(request.file_id), request.offset_bytes
        yield files_pb2.DownloadFileResponse(file=file, offset_bytes=offset)
        content = self.contents[file.id]
        while offset < len(content):
            data = content[offset : offset + 1000]
            yield files_pb2.DownloadFileResponse(offset_bytes=offset, data=data)
            offset += len(data)

    # JobService

    def CreateJob(self, request: jobs_pb2.CreateJobRequest) -> jobs_pb2.CreateJobResponse:
        try:
            spec = parse_spec(request.spec_json)
        except SpecError as error:
            violations = {problem.where.path or "": problem.message for problem in error.problems}
            raise Refusal(Code.INVALID_ARGUMENT, "SPEC_INVALID", str(error), violations=violations) from None
        if request.validate_only:
            return jobs_pb2.CreateJobResponse(job=jobs_pb2.Job(name=spec.name))
        if (known := self.job_of_request.get(request.request_id)) is not None:
            return jobs_pb2.CreateJobResponse(job=self.jobs[known])
        job = jobs_pb2.Job(
            id=f"job-{len(self.jobs) + 1}",
            name=spec.name,
            state=jobs_pb2.JOB_STATE_QUEUED,
            spec_json=request.spec_json,
            spec_version=request.spec_version,
            resources=request.resources,
            labels=request.labels,
        )
        job.create_time.GetCurrentTime()
        self.jobs[job.id] = job
        self.job_of_request[request.request_id] = job.id
        self.add_state(job.id, jobs_pb2.JOB_STATE_QUEUED)
        return jobs_pb2.CreateJobResponse(job=job)

    def _job(self, job_id: str) -> jobs_pb2.Job:
        if job_id not in self.jobs:
            raise Refusal(Code.NOT_FOUND, "JOB_NOT_FOUND", f"there is no job {job_id}", hint="gym jobs list shows them")
        return self.jobs[job_id]

    def GetJob(self, request: jobs_pb2.GetJobRequest) -> jobs_pb2.GetJobResponse:
        return jobs_pb2.GetJobResponse(job=self._job(request.job_id))

    def ListJobs(self, request: jobs_pb2.ListJobsRequest) -> jobs_pb2.ListJobsResponse:
        wanted = [
            job
            for job in self.jobs.values()
            if (not request.states or job.state in request.states)
            and all(job.labels.get(name) == value for name, value in request.labels.items())
        ]
        page, token = self._page(list(reversed(wanted)), request.page_token)
        return jobs_pb2.ListJobsResponse(jobs=page, next_page_token=token)

    def CancelJob(self, request: jobs_pb2.CancelJobRequest) -> jobs_pb2.CancelJobResponse:
        self.add_state(self._job(request.job_id).id, jobs_pb2.JOB_STATE_CANCELLED)
        return jobs_pb2.CancelJobResponse(job=self._job(request.job_id))

    def PauseJob(self, request: jobs_pb2.PauseJobRequest) -> jobs_pb2.PauseJobResponse:
        self.add_state(self._job(request.job_id).id, jobs_pb2.JOB_STATE_PAUSED)
        return jobs_pb2.PauseJobResponse(job=self._job(request.job_id))

    def ResumeJob(self, request: jobs_pb2.ResumeJobRequest) -> jobs_pb2.ResumeJobResponse:
        self.add_state(self._job(request.job_id).id, jobs_pb2.JOB_STATE_QUEUED)
        return jobs_pb2.ResumeJobResponse(job=self._job(request.job_id))

    def DeleteJob(self, request: jobs_pb2.DeleteJobRequest) -> jobs_pb2.DeleteJobResponse:
        if not self.is_final(self._job(request.job_id).id):
            raise Refusal(Code.FAILED_PRECONDITION, "WRONG_STATE", "it still runs", hint="cancel it first")
        del self.jobs[request.job_id]
        return jobs_pb2.DeleteJobResponse()

    def ListJobEvents(self, request: jobs_pb2.ListJobEventsRequest) -> jobs_pb2.ListJobEventsResponse:
        self._job(request.job_id)
        page, token = self._page(self.events[request.job_id], request.page_token)
        return jobs_pb2.ListJobEventsResponse(events=page, next_page_token=token)

    def WatchJobEvents(self, request: jobs_pb2.WatchJobEventsRequest) -> Iterator[jobs_pb2.WatchJobEventsResponse]:
        self._job(request.job_id)
        after, deadline = request.after_sequence, time.monotonic() + 60
        while time.monotonic() < deadline:
            with self.changed:
                fresh, final = self.events[request.job_id][after:], self.is_final(request.job_id)
                if not fresh and not final:
                    self.changed.wait(timeout=0.05)
                    continue
            for event in fresh:
                yield jobs_pb2.WatchJobEventsResponse(events=[event])
            after += len(fresh)
            if final and not fresh:
                return

    def WatchJobLog(self, request: jobs_pb2.WatchJobLogRequest) -> Iterator[jobs_pb2.WatchJobLogResponse]:
        self._job(request.job_id)
        log, offset = self.logs.get(request.job_id, b""), request.offset_bytes
        for line in log[offset:].splitlines(keepends=True):
            offset += len(line)
            yield jobs_pb2.WatchJobLogResponse(text=line.decode(), next_offset_bytes=offset)

    def ListJobCheckpoints(self, request: jobs_pb2.ListJobCheckpointsRequest) -> jobs_pb2.ListJobCheckpointsResponse:
        checkpoint = jobs_pb2.JobCheckpoint(id="checkpoint-1", step=10)
        checkpoint.metrics["loss"].non_finite = events_pb2.NON_FINITE_NAN
        return jobs_pb2.ListJobCheckpointsResponse(checkpoints=[checkpoint])

    def ListJobArtifacts(self, request: jobs_pb2.ListJobArtifactsRequest) -> jobs_pb2.ListJobArtifactsResponse:
        return jobs_pb2.ListJobArtifactsResponse(artifacts=self.artifacts.get(self._job(request.job_id).id, []))

    # ModelService

    def _model(self, model_id: str) -> models_pb2.Model:
        for model in self.models.values():
            if model_id == model.id or model_id in model.aliases:
                return model
        raise Refusal(Code.NOT_FOUND, "MODEL_NOT_FOUND", f"there is no model {model_id}")

    def CreateModel(self, request: models_pb2.CreateModelRequest) -> models_pb2.CreateModelResponse:
        model = models_pb2.Model(id=request.name or f"model-{len(self.models) + 1}")
        model.state = models_pb2.MODEL_STATE_AVAILABLE
        kind = request.WhichOneof("source")
        model.kind = models_pb2.MODEL_KIND_BASE if kind == "base" else models_pb2.MODEL_KIND_ADAPTER
        model.base_model_id = request.adapter.base_model_id
        self.models[model.id] = model
        return models_pb2.CreateModelResponse(model=model)

    def GetModel(self, request: models_pb2.GetModelRequest) -> models_pb2.GetModelResponse:
        return models_pb2.GetModelResponse(model=self._model(request.model_id))

    def ListModels(self, request: models_pb2.ListModelsRequest) -> models_pb2.ListModelsResponse:
        wanted = [m for m in self.models.values() if request.kind in (0, m.kind)]
        page, token = self._page(wanted, request.page_token)
        return models_pb2.ListModelsResponse(models=page, next_page_token=token)

    def DeleteModel(self, request: models_pb2.DeleteModelRequest) -> models_pb2.DeleteModelResponse:
        del self.models[self._model(request.model_id).id]
        return models_pb2.DeleteModelResponse()

    def LoadModel(self, request: models_pb2.LoadModelRequest) -> models_pb2.LoadModelResponse:
        self._model(request.model_id).state = models_pb2.MODEL_STATE_LOADED
        return models_pb2.LoadModelResponse(model=self._model(request.model_id))

    def UnloadModel(self, request: models_pb2.UnloadModelRequest) -> models_pb2.UnloadModelResponse:
        self._model(request.model_id).state = models_pb2.MODEL_STATE_AVAILABLE
        return models_pb2.UnloadModelResponse(model=self._model(request.model_id))

    def SetModelAlias(self, request: models_pb2.SetModelAliasRequest) -> models_pb2.SetModelAliasResponse:
        model = self._model(request.model_id)
        for each in self.models.values():
            if request.alias in each.aliases:
                each.aliases.remove(request.alias)
        model.aliases.append(request.alias)
        return models_pb2.SetModelAliasResponse(model=model)

    def DeleteModelAlias(self, request: models_pb2.DeleteModelAliasRequest) -> models_pb2.DeleteModelAliasResponse:
        self._model(request.alias).aliases.remove(request.alias)
        return models_pb2.DeleteModelAliasResponse()

    # InferenceService: says back what it was told, a word at a time

    def _answer(self, chat: inference_pb2.ChatCompletionInput) -> list[str]:
        said = chat.messages[-1].parts[0].text
        return [word if i == 0 else f" {word}" for i, word in enumerate(said.split(" "))]

    def CreateChatCompletion(
        self, request: inference_pb2.CreateChatCompletionRequest
    ) -> inference_pb2.CreateChatCompletionResponse:
        words = self._answer(request.input)
        choice = inference_pb2.ChatChoice(index=0, finish_reason=inference_pb2.FINISH_REASON_STOP)
        choice.message.role = inference_pb2.CHAT_ROLE_ASSISTANT
        choice.message.parts.add(text="".join(words))
        return inference_pb2.CreateChatCompletionResponse(
            id="chat-1",
            model_id=f"{request.input.model}@1",
            choices=[choice],
            usage=inference_pb2.Usage(prompt_tokens=7, completion_tokens=len(words)),
        )

    def StreamChatCompletion(
        self, request: inference_pb2.StreamChatCompletionRequest
    ) -> Iterator[inference_pb2.StreamChatCompletionResponse]:
        words = self._answer(request.input)
        try:
            for word in words:
                yield inference_pb2.StreamChatCompletionResponse(
                    id="chat-1", model_id=request.input.model, choices=[inference_pb2.ChatChoiceDelta(text=word)]
                )
            while request.input.messages[-1].parts[0].text == "talk for ever":
                time.sleep(0.01)
                yield inference_pb2.StreamChatCompletionResponse(choices=[inference_pb2.ChatChoiceDelta(text=" on")])
            last = inference_pb2.ChatChoiceDelta(finish_reason=inference_pb2.FINISH_REASON_STOP)
            usage = inference_pb2.Usage(prompt_tokens=7, completion_tokens=len(words))
            yield inference_pb2.StreamChatCompletionResponse(choices=[last], usage=usage)
        except GeneratorExit:
            self.cancelled.set()
            raise

    def TokenizeChat(self, request: inference_pb2.TokenizeChatRequest) -> inference_pb2.TokenizeChatResponse:
        return inference_pb2.TokenizeChatResponse(token_ids=[1, 2, 3])

    # ServerService, KeyService

    def GetServerInfo(self, request: server_pb2.GetServerInfoRequest) -> server_pb2.GetServerInfoResponse:
        return server_pb2.GetServerInfoResponse(
            version="0.1.0", spec_version=1, can_train=True, engine="none", scope=server_pb2.KEY_SCOPE_ADMIN
        )

    def CreateKey(self, request: server_pb2.CreateKeyRequest) -> server_pb2.CreateKeyResponse:
        key = server_pb2.Key(
            id=f"key-{len(self.keys) + 1}", name=request.name, scope=request.scope, quota=request.quota
        )
        self.keys[key.id] = key
        return server_pb2.CreateKeyResponse(key=key, secret=f"gym-secret-{key.id}")

    def ListKeys(self, request: server_pb2.ListKeysRequest) -> server_pb2.ListKeysResponse:
        page, token = self._page(list(self.keys.values()), request.page_token)
        return server_pb2.ListKeysResponse(keys=page, next_page_token=token)

    def RevokeKey(self, request: server_pb2.RevokeKeyRequest) -> server_pb2.RevokeKeyResponse:
        self.keys[request.key_id].revoke_time.GetCurrentTime()
        return server_pb2.RevokeKeyResponse(key=self.keys[request.key_id])

    # Every call passes here

    def enter(self, method: str, request: Any, metadata: dict[str, str]) -> Fault | None:
        self.calls.append(method)
        self.requests.append(request)
        self.metadata.append(metadata)
        if metadata.get("authorization") != f"Bearer {KEY}":
            raise Refusal(Code.UNAUTHENTICATED, "KEY_INVALID", "the API key is not known here")
        return self.fault(method)

    def unary(self, method: str, request: Any, metadata: dict[str, str]) -> Any:
        fault = self.enter(method, request, metadata)
        if fault is not None and fault.after_messages == 0:
            raise fault.refusal
        answer = getattr(self, method)(request)
        if fault is not None:  # the work is done, and the answer is lost
            raise fault.refusal
        return answer

    def stream(self, method: str, request: Any, metadata: dict[str, str]) -> Iterator[Any]:
        fault = self.enter(method, request, metadata)
        messages = getattr(self, method)(request)
        try:
            for number, message in enumerate(messages):
                if fault is not None and number >= fault.after_messages:
                    raise fault.refusal
                yield message
            if fault is not None:
                raise fault.refusal
        finally:
            messages.close()
