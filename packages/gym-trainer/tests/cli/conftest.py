"""What the tests of commands begin with: a folder as a user has it, and a run that is killed on its way."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_folder import write_rows, write_tiny_folder

from gym_sdk.events import CheckpointEvent, read_events
from gym_sdk.rundir import find_runs


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, the module's files of rows (`ROWS`) and its specification (`SPEC`), as the current one."""
    write_tiny_folder(tmp_path / "tiny")
    for name, num_rows in request.module.ROWS.items():
        write_rows(tmp_path / name, num_rows)
    (tmp_path / "run.yaml").write_text(request.module.SPEC)
    monkeypatch.setenv("GYM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def train_and_kill(folder: Path) -> Callable[..., Path]:
    """`gym train` in a process of its own, killed after its third checkpoint; returns the run's folder."""

    def run(*arguments: str) -> Path:
        command = [sys.executable, "-c", "from gym_sdk.cli import main; main()", "train", *arguments]
        process = subprocess.Popen([*command, "output.dir=killed"], stderr=subprocess.DEVNULL)
        while process.poll() is None:
            runs = find_runs(folder / "killed")
            events = list(read_events(runs[0] / "events.jsonl")) if runs else []
            if sum(isinstance(event, CheckpointEvent) for event in events) >= 3:
                process.send_signal(signal.SIGKILL)
                break
        assert process.wait(timeout=60) == -signal.SIGKILL
        (killed,) = find_runs(folder / "killed")
        return killed

    return run
