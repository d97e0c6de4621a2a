"""What a daemon knows, as plain values. Each is a snapshot of the moment it was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING

from gym_sdk.events._types import RunEvent, RunState

if TYPE_CHECKING:
    from gym_sdk.spec import RunSpec


class JobState(StrEnum):
    """Where a job stands."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether the job has ended, unless someone resumes it."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """Where a job's run stands."""

    run_state: RunState | None = None
    step: int = 0
    num_steps: int = 0
    """0 until the plan is made."""
    eta_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The latest values by name."""


@dataclass(frozen=True, kw_only=True)
class JobFailure:
    """Why a job failed."""

    message: str
    hint: str = ""
    exit_code: int | None = None
    """Negative: the signal that ended the process."""
    log_lines: tuple[str, ...] = ()
    """The last lines that the job printed."""


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """A job."""

    id: str
    name: str
    state: JobState | None
    """None for a state that only a newer daemon knows."""
    state_message: str = ""
    """What it waits for, or what went wrong."""
    spec_json: str = field(default="", repr=False)
    spec_version: int = 0
    spec_sha256: str = ""
    num_gpus: int | None = None
    max_attempts: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    create_time: datetime | None = None
    start_time: datetime | None = None
    end_time: datetime | None = None
    attempt: int = 0
    progress: JobProgress = JobProgress()
    queue_position: int | None = None
    """Jobs before it in the queue."""
    failure: JobFailure | None = None
    model_id: str = ""
    """The model it made; empty before it succeeded."""
    last_sequence: int = 0
    """The last event's number."""
    owner: str = ""

    @property
    def spec(self) -> RunSpec:
        """The run specification as the daemon accepted it."""
        from gym_sdk.spec import parse_spec

        return parse_spec(self.spec_json)


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """One event of a job: a change of its state, or an event of its run."""

    sequence: int
    """Counts from 1 without gaps over all attempts."""
    time: datetime
    state: JobState | None = None
    """Of a change of state; None otherwise, or for a state that only a newer daemon knows."""
    message: str = ""
    attempt: int = 0
    run: RunEvent | None = None
    """As the trainer wrote it."""


@dataclass(frozen=True, kw_only=True)
class JobCheckpoint:
    """A checkpoint of a job."""

    id: str
    step: int
    create_time: datetime | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    model_id: str = ""


@dataclass(frozen=True, kw_only=True)
class ArtifactFile:
    """One file of an artifact."""

    path: str
    """Relative to the artifact, with forward slashes."""
    file_id: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class JobArtifact:
    """A result of a job."""

    kind: str
    """`adapter`, `model`, `report`, `experiences`."""
    size_bytes: int
    files: tuple[ArtifactFile, ...]


class FilePurpose(StrEnum):
    """What a file is for."""

    DATASET = "dataset"
    """Rows to train or evaluate on; validated when the upload completes."""
    ADAPTER = "adapter"
    """Part of an adapter to register as a model."""
    RESULT = "result"
    """Made by a job."""


@dataclass(frozen=True, kw_only=True)
class DatasetSummary:
    """What validation found in a dataset."""

    format: str
    num_rows: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """A file in the daemon's store."""

    id: str
    filename: str
    purpose: FilePurpose | None
    size_bytes: int
    sha256: str
    create_time: datetime | None = None
    expire_time: datetime | None = None
    dataset: DatasetSummary | None = None
    owner: str = ""


class ModelKind(StrEnum):
    """What a model is."""

    BASE = "base"
    ADAPTER = "adapter"
    EXPERIENCES = "experiences"


class ModelState(StrEnum):
    """Where a model stands."""

    AVAILABLE = "available"
    """On disk, not in the engine."""
    LOADING = "loading"
    LOADED = "loaded"
    """Answers requests."""
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class ModelLineage:
    """Where a model comes from."""

    job_id: str = ""
    spec_sha256: str = ""
    data_sha256: str = ""
    chat_template_sha256: str = ""
    parent_model_id: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """An immutable version of a base, an adapter or a library of experiences."""

    id: str
    kind: ModelKind | None
    state: ModelState | None
    state_message: str = ""
    aliases: tuple[str, ...] = ()
    base_model_id: str = ""
    source: str = ""
    revision: str = ""
    lineage: ModelLineage = ModelLineage()
    sha256: str = ""
    size_bytes: int = 0
    context_length: int = 0
    create_time: datetime | None = None
    owner: str = ""


class KeyScope(StrEnum):
    """What a key may do."""

    USER = "user"
    """Jobs, files and models of its own, and inference."""
    ADMIN = "admin"
    """Everything."""


@dataclass(frozen=True, kw_only=True)
class KeyQuota:
    """Limits of a key; None is the daemon's own default."""

    max_running_jobs: int | None = None
    max_queued_jobs: int | None = None
    max_storage_bytes: int | None = None
    max_requests_per_minute: int | None = None
    max_concurrent_requests: int | None = None


@dataclass(frozen=True, kw_only=True)
class KeyInfo:
    """An API key without its secret."""

    id: str
    name: str
    scope: KeyScope | None
    quota: KeyQuota = KeyQuota()
    create_time: datetime | None = None
    last_use_time: datetime | None = None
    revoke_time: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """What a daemon is and can do."""

    version: str
    spec_version: int
    can_train: bool
    engine: str
    num_gpus: int
    max_file_bytes: int
    max_chunk_bytes: int
    scope: KeyScope | None
    key_id: str
    http_url: str
