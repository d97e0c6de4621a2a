"""Appending events to events.jsonl, so that a crash at any moment leaves whole lines and one sequence."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from gym_sdk.errors import OutputInUse, Where
from gym_sdk.events._convert import event_from_line, event_to_line
from gym_sdk.events._types import (
    ArtifactEvent,
    CheckpointEvent,
    LogEvent,
    LogLevel,
    MetricEvent,
    ProgressEvent,
    RunEvent,
    RunState,
    StateEvent,
)

Event = TypeVar("Event", bound=RunEvent)
BLOCK_BYTES = 1 << 16


class EventWriter:
    """Appends events to a file, each as one whole line, numbered from 1 without gaps.

    A file that a killed process left is continued after its last complete event; a torn line behind it is cut off.
    State, checkpoint and artifact events are on disk (fsync) before the call returns; the others follow within the
    operating system's own time. Safe to share between threads. One writer a file: a second one raises OutputInUse.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path)
        self._lock = threading.Lock()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        try:
            _lock_exclusively(self._file, self.path)
            self._size_bytes, self._sequence = _last_complete_event(self._file)
            os.ftruncate(self._file, self._size_bytes)
        except BaseException:
            os.close(self._file)
            raise
        self._closed = False

    @property
    def sequence(self) -> int:
        """The number of the last event; 0 when there is none."""
        return self._sequence

    def state(self, state: RunState | str, message: str = "") -> StateEvent:
        """The run moved to another state."""
        return self._append(StateEvent, durable=True, state=RunState(state), message=message)

    def progress(
        self,
        stage: str,
        done: float,
        total: float | None = None,
        unit: str = "",
        eta_s: float | None = None,
    ) -> ProgressEvent:
        """How far a long piece of work has come."""
        return self._append(ProgressEvent, stage=stage, done=done, total=total, unit=unit, eta_s=eta_s)

    def metric(self, step: int, values: Mapping[str, float]) -> MetricEvent:
        """Measurements at one optimizer step; NaN and infinities are kept as such."""
        numbers = {name: float(value) for name, value in values.items()}
        return self._append(MetricEvent, step=step, values=numbers)

    def log(self, level: LogLevel | str, text: str) -> LogEvent:
        """A line for people."""
        return self._append(LogEvent, level=LogLevel(level), text=text)

    def checkpoint(self, step: int, path: str) -> CheckpointEvent:
        """A checkpoint is complete on disk; `path` is relative to the run's folder."""
        return self._append(CheckpointEvent, durable=True, step=step, path=path)

    def artifact(self, kind: str, path: str, size_bytes: int) -> ArtifactEvent:
        """A result is complete on disk; `path` is relative to the run's folder."""
        return self._append(ArtifactEvent, durable=True, kind=kind, path=path, size_bytes=size_bytes)

    def close(self) -> None:
        """Put everything on disk and give the file up."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.fsync(self._file)
                os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, event_type: type[Event], /, *, durable: bool = False, **values: Any) -> Event:
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.path} is closed")
            event = event_type(sequence=self._sequence + 1, time=datetime.now(UTC), **values)
            line = event_to_line(event)
            try:
                os.lseek(self._file, self._size_bytes, os.SEEK_SET)
                written = 0
                while written < len(line):
                    written += os.write(self._file, line[written:])
            except OSError:
                # A full disk: take the part of the line back, so that the next event does not grow onto it.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._size_bytes)
                raise
            self._size_bytes += len(line)
            self._sequence += 1
            if durable:
                os.fsync(self._file)
            return event


def _last_complete_event(file: int) -> tuple[int, int]:
    """Where the last complete event ends, and its sequence number; (0, 0) when there is none.

    Read from the end. After a power cut the tail may also hold blocks that were never written (zeros): lines that are
    not events are passed over like a torn one.
    """
    end = os.lseek(file, 0, os.SEEK_END)
    start, tail = end, b""
    while True:
        newline = tail.rfind(b"\n")
        before = tail.rfind(b"\n", 0, newline) if newline >= 0 else -1
        if newline < 0 or (before < 0 and start > 0):
            if start == 0:
                return 0, 0
            size = min(BLOCK_BYTES, start)
            start -= size
            os.lseek(file, start, os.SEEK_SET)
            tail = os.read(file, size) + tail
            continue
        try:
            return start + newline + 1, event_from_line(tail[before + 1 : newline]).sequence
        except ValueError:
            tail = tail[: before + 1]


def _lock_exclusively(file: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows reads runs; it does not train.
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputInUse(
            "another process is writing this run",
            where=Where(file=str(path)),
            hint="wait for it to end, or end it, before resuming the run",
        ) from None
