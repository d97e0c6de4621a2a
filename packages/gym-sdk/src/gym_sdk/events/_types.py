"""The events of a run, as plain values.

RunEvent            sequence (from 1, without gaps), time
├── StateEvent      the run moved to another state
├── ProgressEvent   how far a long piece of work has come
├── MetricEvent     measurements at one optimizer step
├── LogEvent        a line for people
├── CheckpointEvent a checkpoint is complete on disk
├── ArtifactEvent   a result is complete on disk
└── UnknownEvent    of a kind that a newer gym writes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class RunState(StrEnum):
    """Where a run stands. A resumed run goes from a final state back to an earlier one."""

    CREATED = "created"
    """The folder exists and nothing has started."""
    PREPARING = "preparing"
    """The plan is made and the data is prepared."""
    TRAINING = "training"
    EVALUATING = "evaluating"
    EXPORTING = "exporting"
    SUCCEEDED = "succeeded"
    """Final: every artifact is complete."""
    FAILED = "failed"
    """Final: the message says why."""
    CANCELLED = "cancelled"
    """Final: someone ended it; the last checkpoint is kept."""
    PAUSED = "paused"
    """Stopped at a checkpoint on request, to be resumed."""

    @property
    def is_final(self) -> bool:
        """Whether the run has ended for good, unless someone resumes it."""
        return self in (RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED)


class LogLevel(StrEnum):
    """How much a line matters."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """One event of a run."""

    sequence: int
    """Counts from 1 without gaps; a reader that keeps the last one it saw can always go on from there."""
    time: datetime
    """In UTC."""


@dataclass(frozen=True, kw_only=True)
class StateEvent(RunEvent):
    """The run moved to another state."""

    state: RunState | None
    """None for a state that only a newer gym knows."""
    message: str = ""
    """Why; empty where the state says it all."""


@dataclass(frozen=True, kw_only=True)
class ProgressEvent(RunEvent):
    """How far a long piece of work has come."""

    stage: str
    """`download`, `convert`, `tokenize`, `train`, `evaluate`."""
    done: float
    total: float | None = None
    """None where the end is not known."""
    unit: str = ""
    """What is counted: `steps`, `rows`, `bytes`."""
    eta_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class MetricEvent(RunEvent):
    """Measurements at one optimizer step."""

    step: int
    values: Mapping[str, float]
    """By name, with the unit in it; may be NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class LogEvent(RunEvent):
    """A line for people."""

    level: LogLevel
    text: str


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent(RunEvent):
    """A checkpoint is complete on disk."""

    step: int
    path: str
    """Relative to the run's folder, with forward slashes."""


@dataclass(frozen=True, kw_only=True)
class ArtifactEvent(RunEvent):
    """A result is complete on disk."""

    kind: str
    """`adapter`, `model`, `report`, `experiences`."""
    path: str
    """Relative to the run's folder, with forward slashes."""
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(RunEvent):
    """An event of a kind that a newer gym writes. It counts, and says nothing here."""
