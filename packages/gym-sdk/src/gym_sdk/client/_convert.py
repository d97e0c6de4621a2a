"""Between the messages of gym.v1 and plain values. What only a newer daemon knows becomes None."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from gym_sdk._proto.gym.v1 import events_pb2, files_pb2, jobs_pb2, models_pb2, server_pb2
from gym_sdk.client import types
from gym_sdk.events import RunState, event_from_proto
from gym_sdk.events._convert import metric_number

Enum = TypeVar("Enum", bound=StrEnum)


def enum_value(kind: type[Enum], wrapper: Any, prefix: str, number: int) -> Enum | None:
    """The member of a StrEnum for a protobuf enum's number; None where it is unspecified or new."""
    found = wrapper.DESCRIPTOR.values_by_number.get(number)
    name = found.name.removeprefix(prefix) if found is not None else ""
    return kind[name] if name in kind.__members__ else None


def enum_number(value: StrEnum | str | None, kind: type[StrEnum], wrapper: Any, prefix: str) -> Any:
    """The protobuf enum's number for a member, or for its text."""
    return wrapper.Value(f"{prefix}{kind(value).name}" if value is not None else f"{prefix}UNSPECIFIED")


def time_of(message: Message, name: str) -> datetime | None:
    """A timestamp field; None where it is absent."""
    stamp: Timestamp = getattr(message, name)
    return stamp.ToDatetime(UTC) if message.HasField(name) else None


def optional(message: Message, name: str) -> Any:
    """An `optional` field; None where it is absent."""
    return getattr(message, name) if message.HasField(name) else None


def job_values(job: jobs_pb2.Job) -> dict[str, Any]:
    """The fields of a JobInfo."""
    return {
        "id": job.id,
        "name": job.name,
        "state": enum_value(types.JobState, jobs_pb2.JobState, "JOB_STATE_", job.state),
        "state_message": job.state_message,
        "spec_json": job.spec_json,
        "spec_version": job.spec_version,
        "spec_sha256": job.spec_sha256,
        "num_gpus": optional(job.resources, "num_gpus"),
        "max_attempts": job.retry_policy.max_attempts,
        "labels": dict(job.labels),
        "create_time": time_of(job, "create_time"),
        "start_time": time_of(job, "start_time"),
        "end_time": time_of(job, "end_time"),
        "attempt": job.attempt,
        "progress": types.JobProgress(
            run_state=enum_value(RunState, events_pb2.RunState, "RUN_STATE_", job.progress.run_state),
            step=job.progress.step,
            num_steps=job.progress.num_steps,
            eta_s=optional(job.progress, "eta_s"),
            metrics=numbers_of(job.progress.metrics),
        ),
        "queue_position": optional(job, "queue_position"),
        "failure": types.JobFailure(
            message=job.failure.message,
            hint=job.failure.hint,
            exit_code=optional(job.failure, "exit_code"),
            log_lines=tuple(job.failure.log_lines),
        )
        if job.HasField("failure")
        else None,
        "model_id": job.model_id,
        "last_sequence": job.last_sequence,
        "owner": job.owner,
    }


def numbers_of(values: Mapping[str, events_pb2.MetricValue]) -> dict[str, float]:
    """Metrics by name."""
    return {name: metric_number(value) for name, value in values.items()}


def job_event(event: jobs_pb2.JobEvent) -> types.JobEvent:
    """An event of a job."""
    time = event.time.ToDatetime(UTC)
    if event.WhichOneof("event") == "run":
        return types.JobEvent(sequence=event.sequence, time=time, run=event_from_proto(event.run))
    return types.JobEvent(
        sequence=event.sequence,
        time=time,
        state=enum_value(types.JobState, jobs_pb2.JobState, "JOB_STATE_", event.job_state.state),
        message=event.job_state.message,
        attempt=event.job_state.attempt,
    )


def job_checkpoint(checkpoint: jobs_pb2.JobCheckpoint) -> types.JobCheckpoint:
    """A checkpoint of a job."""
    return types.JobCheckpoint(
        id=checkpoint.id,
        step=checkpoint.step,
        create_time=time_of(checkpoint, "create_time"),
        metrics=numbers_of(checkpoint.metrics),
        model_id=checkpoint.model_id,
    )


def job_artifact(artifact: jobs_pb2.JobArtifact) -> types.JobArtifact:
    """A result of a job."""
    return types.JobArtifact(
        kind=artifact.kind,
        size_bytes=artifact.size_bytes,
        files=tuple(
            types.ArtifactFile(path=each.path, file_id=each.file_id, size_bytes=each.size_bytes, sha256=each.sha256)
            for each in artifact.files
        ),
    )


def file_info(file: files_pb2.File) -> types.FileInfo:
    """A file."""
    return types.FileInfo(
        id=file.id,
        filename=file.filename,
        purpose=enum_value(types.FilePurpose, files_pb2.FilePurpose, "FILE_PURPOSE_", file.purpose),
        size_bytes=file.size_bytes,
        sha256=file.sha256,
        create_time=time_of(file, "create_time"),
        expire_time=time_of(file, "expire_time"),
        dataset=types.DatasetSummary(
            format=file.dataset.format, num_rows=file.dataset.num_rows, warnings=tuple(file.dataset.warnings)
        )
        if file.HasField("dataset")
        else None,
        owner=file.owner,
    )


def file_purpose(purpose: types.FilePurpose | str | None) -> Any:
    """The number of a purpose."""
    return enum_number(purpose, types.FilePurpose, files_pb2.FilePurpose, "FILE_PURPOSE_")


def model_info(model: models_pb2.Model) -> types.ModelInfo:
    """A model."""
    return types.ModelInfo(
        id=model.id,
        kind=enum_value(types.ModelKind, models_pb2.ModelKind, "MODEL_KIND_", model.kind),
        state=enum_value(types.ModelState, models_pb2.ModelState, "MODEL_STATE_", model.state),
        state_message=model.state_message,
        aliases=tuple(model.aliases),
        base_model_id=model.base_model_id,
        source=model.source,
        revision=model.revision,
        lineage=types.ModelLineage(
            job_id=model.lineage.job_id,
            spec_sha256=model.lineage.spec_sha256,
            data_sha256=model.lineage.data_sha256,
            chat_template_sha256=model.lineage.chat_template_sha256,
            parent_model_id=model.lineage.parent_model_id,
        ),
        sha256=model.sha256,
        size_bytes=model.size_bytes,
        context_length=model.context_length,
        create_time=time_of(model, "create_time"),
        owner=model.owner,
    )


def model_kind(kind: types.ModelKind | str | None) -> Any:
    """The number of a kind."""
    return enum_number(kind, types.ModelKind, models_pb2.ModelKind, "MODEL_KIND_")


QUOTA_FIELDS = tuple(types.KeyQuota.__dataclass_fields__)


def key_info(key: server_pb2.Key) -> types.KeyInfo:
    """A key."""
    return types.KeyInfo(
        id=key.id,
        name=key.name,
        scope=key_scope_value(key.scope),
        quota=types.KeyQuota(**{name: optional(key.quota, name) for name in QUOTA_FIELDS}),
        create_time=time_of(key, "create_time"),
        last_use_time=time_of(key, "last_use_time"),
        revoke_time=time_of(key, "revoke_time"),
    )


def key_scope_value(number: int) -> types.KeyScope | None:
    """The scope of a number."""
    return enum_value(types.KeyScope, server_pb2.KeyScope, "KEY_SCOPE_", number)


def key_scope(scope: types.KeyScope | str) -> Any:
    """The number of a scope."""
    return enum_number(scope, types.KeyScope, server_pb2.KeyScope, "KEY_SCOPE_")


def key_quota(quota: types.KeyQuota | None) -> server_pb2.KeyQuota | None:
    """The message of a quota."""
    if quota is None:
        return None
    given = {name: getattr(quota, name) for name in QUOTA_FIELDS}
    return server_pb2.KeyQuota(**{name: value for name, value in given.items() if value is not None})


def server_info(info: server_pb2.GetServerInfoResponse) -> types.ServerInfo:
    """What a daemon is."""
    return types.ServerInfo(
        version=info.version,
        spec_version=info.spec_version,
        can_train=info.can_train,
        engine=info.engine,
        num_gpus=info.num_gpus,
        max_file_bytes=info.max_file_bytes,
        max_chunk_bytes=info.max_chunk_bytes,
        scope=key_scope_value(info.scope),
        key_id=info.key_id,
        http_url=info.http_url,
    )
