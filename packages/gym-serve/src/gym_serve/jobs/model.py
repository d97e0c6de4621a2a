"""What a job is: its states, its record, its events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class JobState(StrEnum):
    """Where a job stands."""

    QUEUED = "queued"
    """Accepted; waits for its turn, or for the next attempt."""
    STARTING = "starting"
    """Its processes have been started and have not said anything yet."""
    RUNNING = "running"
    """The run writes events."""
    PAUSING = "pausing"
    """Was told to stop so that it can be resumed."""
    PAUSED = "paused"
    """Stopped; resuming puts it back into the queue."""
    CANCELLING = "cancelling"
    """Was told to stop for good."""
    CANCELLED = "cancelled"
    """Stopped by its owner; its last checkpoint is kept, and resuming goes on from there."""
    FAILED = "failed"
    """Ended in an error; resuming goes on from the last checkpoint."""
    SUCCEEDED = "succeeded"
    """Done; what it has made is registered."""


OUTPUT_FILE = "output.log"
"""What the job's processes print, over all attempts."""
ACTIVE = frozenset({JobState.STARTING, JobState.RUNNING, JobState.PAUSING, JobState.CANCELLING})
"""States in which processes run."""
FINAL = frozenset({JobState.CANCELLED, JobState.FAILED, JobState.SUCCEEDED})
"""States that nothing but a call of the user leaves."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a job failed."""

    message: str
    exit_code: int | None = None
    """Of the job's command; negative: the signal that ended it."""
    hint: str = ""
    log_lines: tuple[str, ...] = ()
    """The last lines that the job printed."""


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A file that a job made, kept in the file store."""

    kind: str
    """`adapter`, `model`, `experiences`, `report`, `metrics`."""
    path: str
    """Below the artifact, with forward slashes."""
    file_id: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that a run has written."""

    job_id: str
    step: int
    path: str
    """Below the run directory."""
    created_at: float
    progress: bytes
    """A gym.v1.JobProgress: where the run stood."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job, as its row says. Times are seconds since 1970."""

    id: str
    owner: str
    name: str
    spec_json: str
    """The specification as it was given, in canonical JSON."""
    spec_sha256: str
    labels: dict[str, str]
    origin: dict[str, object]
    """What the interface that made it must give back later: OpenAI's names of files and hyperparameters."""
    num_gpus: int
    max_attempts: int
    state: JobState
    message: str
    """Why it is in this state, where the state does not say it all."""
    failure: Failure | None
    """Only of a failed job."""
    progress: bytes
    """A gym.v1.JobProgress: where the run stands by its events."""
    num_tokens: int = 0
    """Tokens that the run has computed on, by its own metrics."""
    created_at: float
    queued_at: float
    started_at: float | None
    finished_at: float | None
    attempt: int
    """Attempts so far, the present one included."""
    not_before: float
    """A queued job is not started before this time."""
    run_dir: str | None
    run_cursor: int
    """The sequence number of the last event that was taken over from the run's own log."""
    last_sequence: int
    model_id: str | None
    artifacts: tuple[Artifact, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """One event of a job. Either the daemon's own (`state`) or one that the run wrote (`run`, a gym.v1.RunEvent)."""

    sequence: int
    """Counts from 1 without gaps, over all attempts: a reader that keeps the last one can always go on from there."""
    time: float
    attempt: int
    state: JobState | None = None
    message: str = ""
    run: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a job."""

    job_id: str
    number: int
    directory: str
    gpus: list[int]
    process: dict[str, object]
    started_at: float
    ended_at: float | None
    outcome: str | None


def checkpoint_name(job: Job, step: int) -> str:
    """The id of the model that a checkpoint is."""
    return f"{job.model_id or job.id}:ckpt-step-{step}"
