"""Between the daemon's own values and the messages of gym.v1."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

from google.protobuf.timestamp_pb2 import Timestamp

from gym_sdk._proto.gym.v1 import events_pb2, files_pb2, jobs_pb2, models_pb2, server_pb2
from gym_serve.auth import Key, Quota, Scope
from gym_serve.catalog import Model, ModelKind
from gym_serve.errors import invalid
from gym_serve.files.announced import ADAPTER_PURPOSE, RESULT_PURPOSE, TRAINING_PURPOSE
from gym_serve.files.store import File, Upload
from gym_serve.jobs.model import Artifact, Checkpoint, Job, JobEvent, JobState

MAX_CHUNK_BYTES = 4 * 1024 * 1024
"""Of an upload; small enough that a slow line finishes one before it breaks, large enough that calls cost little."""

_PURPOSES = {
    files_pb2.FILE_PURPOSE_DATASET: TRAINING_PURPOSE,
    files_pb2.FILE_PURPOSE_ADAPTER: ADAPTER_PURPOSE,
    files_pb2.FILE_PURPOSE_RESULT: RESULT_PURPOSE,
}
_PURPOSE_NUMBERS = {name: number for number, name in _PURPOSES.items()}
_KINDS = {
    models_pb2.MODEL_KIND_BASE: ModelKind.BASE,
    models_pb2.MODEL_KIND_ADAPTER: ModelKind.ADAPTER,
    models_pb2.MODEL_KIND_EXPERIENCES: ModelKind.EXPERIENCES,
}
_KIND_NUMBERS = {kind: number for number, kind in _KINDS.items()}
_QUOTAS = tuple(Quota.__dataclass_fields__)


def timestamp(seconds: float) -> Timestamp:
    """A time since 1970, to the millisecond."""
    milliseconds = round(seconds * 1000)
    return Timestamp(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000)


# Pages: a token is the last item's id and the filters that it belongs to.


def read_page(
    page_size: int, page_token: str, filters: Mapping[str, object], default: int = 50
) -> tuple[str | None, int]:
    """The item after which the page begins, and the page's size (at most 1000)."""
    size = min(page_size or default, 1000)
    if not page_token:
        return None, size
    try:
        after, given = json.loads(base64.urlsafe_b64decode(page_token.encode()))
    except (ValueError, TypeError):
        raise invalid("the page token is not one that this server gave", field="page_token") from None
    if given != _comparable(filters) or not isinstance(after, str):
        raise invalid("the page token belongs to a request with other filters", field="page_token")
    return after, size


def next_page_token(last_id: str, filters: Mapping[str, object]) -> str:
    """The token of the page behind an item."""
    return base64.urlsafe_b64encode(json.dumps([last_id, _comparable(filters)]).encode()).decode()


def _comparable(filters: Mapping[str, object]) -> object:
    return json.loads(json.dumps(filters, sort_keys=True))


# Files.


def purpose_of(number: files_pb2.FilePurpose.ValueType) -> str:
    """The name of a purpose."""
    if number not in _PURPOSES:
        raise invalid("the purpose must be one of DATASET, ADAPTER and RESULT", field="purpose")
    return _PURPOSES[number]


def file_message(file: File) -> files_pb2.File:
    """A file."""
    message = files_pb2.File(
        id=file.id,
        filename=file.filename,
        purpose=_PURPOSE_NUMBERS.get(file.purpose, files_pb2.FILE_PURPOSE_UNSPECIFIED),
        size_bytes=file.size_bytes,
        sha256=file.sha256,
        create_time=timestamp(file.created_at),
        owner=file.owner,
    )
    if file.expires_at is not None:
        message.expire_time.CopyFrom(timestamp(file.expires_at))
    if file.num_rows is not None:
        message.dataset.CopyFrom(files_pb2.DatasetSummary(format=file.format or "", num_rows=file.num_rows))
    return message


def upload_message(upload: Upload, received_bytes: int, expiry_s: float) -> files_pb2.Upload:
    """An upload."""
    return files_pb2.Upload(
        id=upload.id,
        filename=upload.filename,
        purpose=_PURPOSE_NUMBERS.get(upload.purpose, files_pb2.FILE_PURPOSE_UNSPECIFIED),
        size_bytes=upload.size_bytes,
        sha256=upload.sha256 or "",
        received_bytes=received_bytes,
        max_chunk_bytes=MAX_CHUNK_BYTES,
        create_time=timestamp(upload.created_at),
        expire_time=timestamp(upload.touched_at + expiry_s),
    )


# Jobs.


def state_number(state: JobState) -> jobs_pb2.JobState.ValueType:
    """A state by its number."""
    return jobs_pb2.JobState.Value(f"JOB_STATE_{state.name}")


def state_of(number: jobs_pb2.JobState.ValueType) -> JobState:
    """A state by its number."""
    name = jobs_pb2.JobState.Name(number) if number in jobs_pb2.JobState.values() else ""
    if not name or number == jobs_pb2.JOB_STATE_UNSPECIFIED:
        raise invalid(f"{number} is no state of a job", field="states")
    return JobState[name.removeprefix("JOB_STATE_")]


def job_message(job: Job, queue_position: int | None = None) -> jobs_pb2.Job:
    """A job."""
    message = jobs_pb2.Job(
        id=job.id,
        name=job.name,
        state=state_number(job.state),
        state_message=job.message,
        spec_json=job.spec_json,
        spec_version=json.loads(job.spec_json)["spec_version"],
        spec_sha256=job.spec_sha256,
        resources=jobs_pb2.JobResources(num_gpus=job.num_gpus),
        retry_policy=jobs_pb2.RetryPolicy(max_attempts=job.max_attempts),
        labels=job.labels,
        create_time=timestamp(job.created_at),
        attempt=job.attempt,
        progress=jobs_pb2.JobProgress.FromString(job.progress),
        model_id=job.model_id or "",
        last_sequence=job.last_sequence,
        owner=job.owner,
    )
    if job.started_at is not None:
        message.start_time.CopyFrom(timestamp(job.started_at))
    if job.finished_at is not None:
        message.end_time.CopyFrom(timestamp(job.finished_at))
    if queue_position is not None:
        message.queue_position = queue_position
    if job.failure is not None:
        message.failure.CopyFrom(
            jobs_pb2.JobFailure(
                message=job.failure.message,
                hint=job.failure.hint,
                exit_code=job.failure.exit_code,
                log_lines=job.failure.log_lines,
            )
        )
    return message


def event_message(event: JobEvent) -> jobs_pb2.JobEvent:
    """An event of a job."""
    message = jobs_pb2.JobEvent(sequence=event.sequence, time=timestamp(event.time))
    if event.state is not None:
        message.job_state.CopyFrom(
            jobs_pb2.JobStateEvent(state=state_number(event.state), message=event.message, attempt=event.attempt)
        )
    elif event.run is not None:
        message.run.CopyFrom(events_pb2.RunEvent.FromString(event.run))
    return message


def checkpoint_message(checkpoint: Checkpoint, model_id: str) -> jobs_pb2.JobCheckpoint:
    """A checkpoint."""
    return jobs_pb2.JobCheckpoint(
        id=str(checkpoint.step),
        step=checkpoint.step,
        create_time=timestamp(checkpoint.created_at),
        metrics=jobs_pb2.JobProgress.FromString(checkpoint.progress).metrics,
        model_id=model_id,
    )


def artifact_messages(artifacts: tuple[Artifact, ...]) -> list[jobs_pb2.JobArtifact]:
    """A job's files, by kind."""
    found: dict[str, jobs_pb2.JobArtifact] = {}
    for artifact in artifacts:
        message = found.setdefault(artifact.kind, jobs_pb2.JobArtifact(kind=artifact.kind))
        message.size_bytes += artifact.size_bytes
        message.files.add(
            path=artifact.path, file_id=artifact.file_id, size_bytes=artifact.size_bytes, sha256=artifact.sha256
        )
    return list(found.values())


# Models and keys.


def kind_of(number: models_pb2.ModelKind.ValueType) -> ModelKind | None:
    """A kind; None for any."""
    if number == models_pb2.MODEL_KIND_UNSPECIFIED:
        return None
    if number not in _KINDS:
        raise invalid(f"{number} is no kind of a model", field="kind")
    return _KINDS[number]


def model_message(
    model: Model, state: models_pb2.ModelState.ValueType, state_message: str = "", context_length: int = 0
) -> models_pb2.Model:
    """A model."""
    return models_pb2.Model(
        id=model.id,
        kind=_KIND_NUMBERS[model.kind],
        state=state,
        state_message=state_message,
        aliases=model.aliases,
        base_model_id=model.base_id or "",
        # Of an adapter it would be a path of this machine.
        source=model.source if model.kind is ModelKind.BASE and model.job_id is None else "",
        revision=model.revision or "",
        lineage=models_pb2.ModelLineage(
            job_id=model.job_id or "",
            **{name: value for name, value in model.lineage.items() if name in _LINEAGE},
        ),
        sha256=(model.content_id or "").removeprefix("sha256:"),
        size_bytes=model.size_bytes,
        context_length=context_length,
        create_time=timestamp(model.created_at),
        owner=model.owner,
    )


_LINEAGE = frozenset({"spec_sha256", "data_sha256", "chat_template_sha256", "parent_model_id"})


def key_message(key: Key) -> server_pb2.Key:
    """A key, without its secret."""
    message = server_pb2.Key(
        id=key.id,
        name=key.name,
        scope=server_pb2.KEY_SCOPE_ADMIN if key.is_admin else server_pb2.KEY_SCOPE_USER,
        quota=server_pb2.KeyQuota(**{name: getattr(key.quota, name) for name in _QUOTAS}),
        create_time=timestamp(key.created_at),
    )
    if key.last_used_at is not None:
        message.last_use_time.CopyFrom(timestamp(key.last_used_at))
    if key.revoked_at is not None:
        message.revoke_time.CopyFrom(timestamp(key.revoked_at))
    return message


def scope_of(number: server_pb2.KeyScope.ValueType) -> Scope:
    """A scope by its number."""
    scopes = {server_pb2.KEY_SCOPE_USER: Scope.USER, server_pb2.KEY_SCOPE_ADMIN: Scope.ADMIN}
    if number not in scopes:
        raise invalid("the scope must be USER or ADMIN", field="scope")
    return scopes[number]


def quota_of(message: server_pb2.KeyQuota) -> Quota:
    """The limits of a key that are its own."""
    given = {field.name for field, _ in message.ListFields()}
    return Quota(**{name: getattr(message, name) for name in _QUOTAS if name in given})
