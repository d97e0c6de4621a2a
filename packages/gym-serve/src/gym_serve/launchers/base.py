"""What starts jobs and finds them again, as the daemon sees it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gym_serve.jobs.supervisor import EXIT_FILE

TOKEN_VARIABLE = "GYM_ATTEMPT"
"""Marks the processes of an attempt, to find them when their supervisor is gone."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One attempt at a job."""

    command: Sequence[str]
    directory: Path
    """A folder of this attempt's own, for its end."""
    output: Path
    """The file to which all that it prints is appended."""
    working_directory: Path
    environment: Mapping[str, str]
    """All of it: nothing of the daemon's own environment is added."""
    token: str
    """A random word that marks every process of this attempt."""
    grace_s: float
    num_gpus: int = 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an attempt ended."""

    exit_code: int | None
    """None when it did not end by itself."""
    signal: int | None = None
    stopped: bool = False
    """Whether the daemon had asked it to stop."""
    lost: bool = False
    """Whether it vanished without a word: its supervisor was killed, or the machine went down."""

    @property
    def succeeded(self) -> bool:
        """Whether the command ended with 0."""
        return self.exit_code == 0

    @property
    def interrupted(self) -> bool:
        """Whether something outside the job ended it, so that trying again may help."""
        return self.lost or (self.signal is not None and not self.stopped)

    def describe(self) -> str:
        """The end in words."""
        if self.lost:
            return "its processes were gone"
        if self.signal is not None:
            return f"ended by signal {self.signal}"
        return f"ended with exit code {self.exit_code}"


def read_outcome(directory: Path) -> Outcome | None:
    """What a supervisor wrote at the end of an attempt."""
    try:
        record = json.loads((directory / EXIT_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Outcome(exit_code=record["exit_code"], signal=record["signal"], stopped=record["stopped"])


class Launcher(Protocol):
    """Starts attempts; knows them again by the process record that it gave out. Its methods are called in threads."""

    def start(self, launch: Launch, record: Callable[[dict[str, object]], None]) -> None:
        """Starts an attempt. `record` is called with what finds it again, and returns when that is on disk; only
        then does the job run. When `record` raises, nothing runs."""
        ...

    def is_alive(self, process: Mapping[str, object]) -> bool:
        """Whether the attempt still runs."""
        ...

    def stop(self, process: Mapping[str, object]) -> None:
        """Asks an attempt to end: politely first, then by force after its grace time. Returns at once."""
        ...

    def outcome(self, directory: Path) -> Outcome | None:
        """How the attempt ended; None while nothing is written."""
        ...

    def sweep(self, process: Mapping[str, object]) -> int:
        """Kills what a lost attempt left behind, and says how many processes that were."""
        ...
