"""The command as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = Path(sys.executable).with_name("gym")


@dataclass(frozen=True)
class Done:
    """What a command left: its exit code, the data on stdout, the words on stderr."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Trained:
    """A finished run's folder, and what `gym train` said."""

    folder: Path
    done: Done


Gym = Callable[..., Done]


def run_gym(
    *arguments: str | Path, code: int = 0, cwd: Path = REPOSITORY, stdin: str = "", env: Mapping[str, str] | None = None
) -> Done:
    """`gym ARGUMENTS` in a process of its own; fails when the exit code is another, or on any traceback."""
    done = subprocess.run(
        [str(COMMAND), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "120", **(env or {})},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    said = f"gym {' '.join(map(str, arguments))} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == code, said
    assert "Traceback" not in done.stdout + done.stderr, said
    return Done(done.returncode, done.stdout, done.stderr)
