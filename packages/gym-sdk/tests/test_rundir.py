"""Guards the run directory: it appears whole or not at all, and says what is wrong with a path that is none."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from gym_sdk import rundir
from gym_sdk.errors import OutputInUse, UserError
from gym_sdk.events import EventWriter, RunState
from gym_sdk.rundir import RunDir, find_runs, new_id


def test_a_run_is_made_and_opened(tmp_path: Path) -> None:
    made = RunDir.create(tmp_path / "runs", "ranger-notes")
    assert made.path == tmp_path / "runs" / f"ranger-notes-{made.id}"
    assert json.loads((made.path / "run.json").read_text())["schema_version"] == 1
    opened = RunDir.open(made.path)
    assert (opened.path, opened.name, opened.id) == (made.path, "ranger-notes", made.id)
    assert sorted(path.name for path in made.path.iterdir()) == ["checkpoints", "data", "run.json"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [made.path.name]


def test_ids_sort_by_time() -> None:
    ids = []
    for _ in range(5):
        ids.append(new_id())
        start_ms = time.time_ns() // 1_000_000
        while time.time_ns() // 1_000_000 == start_ms:
            pass
    assert ids == sorted(ids)
    assert all(len(each) == 10 for each in ids)


def test_runs_of_one_moment_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter(["aaaa", "aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr(rundir, "new_id", lambda: next(ids))
    first, second = RunDir.create(tmp_path, "x"), RunDir.create(tmp_path, "x")
    assert (first.id, second.id) == ("aaaa", "bbbb")


def test_the_state_is_that_of_the_last_state_event(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    assert run.state() is RunState.CREATED
    with EventWriter(run.events_path) as events:
        events.state(RunState.TRAINING)
        events.log("info", "x")
        assert run.state() is RunState.TRAINING
        events.state("failed", "out of memory")
    assert run.state() is RunState.FAILED
    assert run.state().is_final
    with run.events_path.open("ab") as file:
        file.write(b'{"sequence": 4, "time": "2026-11-27T12:00:00Z", "state": {"state": "RUN_STATE_TRAI')
    assert run.state() is RunState.FAILED


def test_paths_that_are_no_run_say_what_they_are(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    RunDir.create(runs, "x")
    (tmp_path / "file").touch()
    (runs / "newer").mkdir()
    (runs / "newer" / "run.json").write_text(
        '{"schema_version": 9, "name": "n", "id": "0", "created_at": "2026-01-01"}'
    )
    (runs / "broken").mkdir()
    (runs / "broken" / "run.json").write_text("{")
    cases = {
        runs / "nope": "there is no such run\nhint: runs in",
        tmp_path / "file": "is a file; a run is a folder",
        runs: f"is not a run: it has no run.json\nhint: runs in {runs}: ",
        runs / "newer": "written by a newer gym (run version 9; this one reads up to 1)\nhint: upgrade gym-sdk",
        runs / "broken": "its run.json cannot be read",
    }
    for path, expected in cases.items():
        with pytest.raises(UserError) as caught:
            RunDir.open(path)
        assert str(caught.value).startswith(f"{path}: {expected}")


def test_a_place_that_cannot_hold_runs_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(OutputInUse, match=r"is a file; runs need a folder\nhint: set output\.dir"):
        RunDir.create(tmp_path / "runs", "x")
    with pytest.raises(UserError, match="is not a run's name"):
        RunDir.create(tmp_path, "../x")


@pytest.mark.skipif(sys.platform == "win32", reason="folders are named differently")
def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rundir, "_write_durably", fail)
    with pytest.raises(OutputInUse, match="No space left on device"):
        RunDir.create(tmp_path, "x")
    assert list(tmp_path.iterdir()) == []


def test_runs_are_found_newest_first(tmp_path: Path) -> None:
    made = [RunDir.create(tmp_path, name) for name in ("b", "a", "c")]
    expected = sorted(made, key=lambda run: run.id, reverse=True)
    assert find_runs(tmp_path) == [run.path for run in expected]
    assert find_runs(tmp_path / "nope") == []
