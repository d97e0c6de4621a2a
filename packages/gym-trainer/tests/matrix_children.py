"""What stands in for an architecture's checks, in a module that a process of its own can import by name."""

from __future__ import annotations

import os
import signal
from dataclasses import asdict
from pathlib import Path

from gym_trainer.matrix.architectures import Architecture
from gym_trainer.matrix.checks import CHECKS, Outcome, Row
from gym_trainer.matrix.child import versions
from gym_trainer.records import write_json


def die(architecture: Architecture, result: Path, log: Path, memory_bytes: int) -> None:
    """The process crashes."""
    os.kill(os.getpid(), signal.SIGSEGV)


def pretend(architecture: Architecture, result: Path, log: Path, memory_bytes: int) -> None:
    """Every check passes."""
    row = Row(
        model_type=architecture.model_type,
        class_name=architecture.class_name,
        group=architecture.group,
        aliases=architecture.aliases,
        checks=dict.fromkeys(CHECKS, Outcome(status="pass")),
    )
    write_json(result, {"versions": versions(), "row": asdict(row)})
