"""Guards events.jsonl: one sequence without gaps whatever is killed when, in a form any language reads."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_sdk._proto.gym.v1 import events_pb2 as pb
from gym_sdk.errors import DataError, OutputInUse
from gym_sdk.events import (
    ArtifactEvent,
    CheckpointEvent,
    EventWriter,
    LogEvent,
    LogLevel,
    MetricEvent,
    ProgressEvent,
    RunEvent,
    RunState,
    StateEvent,
    UnknownEvent,
    event_from_proto,
    event_to_proto,
    read_events,
)
from gym_sdk.events._convert import event_from_line, event_to_line


def write_some(path: Path) -> list[RunEvent]:
    with EventWriter(path) as events:
        return [
            events.state(RunState.TRAINING),
            events.progress("train", 1, 10, "steps", 2.5),
            events.progress("download", 5, unit="bytes"),
            events.metric(1, {"loss": 1.5, "grad_norm": math.inf, "z": -math.inf}),
            events.log("warning", "höher ☃"),
            events.checkpoint(1, "checkpoints/checkpoint-1"),
            events.artifact("adapter", "adapter", 2**45 + 1),
        ]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = write_some(tmp_path / "events.jsonl")
    assert list(read_events(tmp_path / "events.jsonl")) == written
    assert [event.sequence for event in written] == [1, 2, 3, 4, 5, 6, 7]
    assert [type(event) for event in written] == [
        StateEvent, ProgressEvent, ProgressEvent, MetricEvent, LogEvent, CheckpointEvent, ArtifactEvent,
    ]  # fmt: skip


def test_each_line_is_the_proto_json_that_any_language_reads(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_some(path)
    for line in path.read_text(encoding="utf-8").splitlines():
        message = json_format.Parse(line, pb.RunEvent())
        assert json_format.MessageToDict(message, preserving_proto_field_name=True) == json.loads(line)
    first, _, _, metric, *_, artifact = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert (first["sequence"], first["state"]) == (1, {"state": "RUN_STATE_TRAINING"})
    assert metric["metric"] == {
        "step": 1,
        "values": {
            "loss": {"number": 1.5},
            "grad_norm": {"non_finite": "NON_FINITE_POSITIVE_INFINITY"},
            "z": {"non_finite": "NON_FINITE_NEGATIVE_INFINITY"},
        },
    }
    assert artifact["artifact"]["size_bytes"] == 2**45 + 1


def test_nan_is_typed_and_never_text(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as events:
        events.metric(1, {"loss": math.nan})
    assert "NaN" not in path.read_text().replace("NON_FINITE_NAN", "")
    (event,) = read_events(path)
    assert isinstance(event, MetricEvent)
    assert math.isnan(event.values["loss"])


def test_reading_goes_on_after_a_sequence_number(tmp_path: Path) -> None:
    written = write_some(tmp_path / "events.jsonl")
    for after in range(9):
        assert list(read_events(tmp_path / "events.jsonl", after=after)) == written[after:]


def test_no_file_is_no_events(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "events.jsonl")) == []


def test_a_torn_line_is_no_event_and_is_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    written = write_some(path)
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for cut in range(len(last)):
        path.write_bytes(whole + last[:cut])
        assert list(read_events(path)) == written
        with EventWriter(path) as events:
            assert events.sequence == 7
            following = events.state(RunState.SUCCEEDED)
        assert list(read_events(path)) == [*written, following]
        assert path.read_bytes().startswith(whole)


@pytest.mark.parametrize("tail", [b"\0" * 5000, b"\0\0\n\0\0\n", b"{}{\n", b'\xff\xfe\n{"sequence": 9'])
def test_a_tail_that_a_power_cut_left_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "events.jsonl"
    written = write_some(path)
    with path.open("ab") as file:
        file.write(tail)
    with EventWriter(path) as events:
        following = events.state(RunState.FAILED, "power")
    assert list(read_events(path)) == [*written, following]


def test_the_last_event_is_found_behind_long_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as events:
        for _ in range(3):
            events.log("info", "x" * 200_000)
    with path.open("ab") as file:
        file.write(b"y" * 300_000)
    with EventWriter(path) as events:
        assert events.sequence == 3


LOGS = st.lists(st.text(max_size=200), min_size=1, max_size=8)


@given(texts=LOGS, cut=st.integers(0, 3000), more=LOGS)
@settings(max_examples=60, deadline=None)
def test_a_file_cut_anywhere_goes_on_as_one_sequence(texts: list[str], cut: int, more: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        with EventWriter(path) as events:
            written = [events.log("info", text) for text in texts]
        content = path.read_bytes()[:cut]
        path.write_bytes(content)
        kept = written[: content.count(b"\n")]
        assert list(read_events(path)) == kept
        with EventWriter(path) as events:
            kept += [events.log("error", text) for text in more]
        assert list(read_events(path)) == kept
        assert [event.sequence for event in kept] == list(range(1, len(kept) + 1))


NUMBERS = st.floats() | st.integers(-(2**53), 2**53)
COMMON = {
    "sequence": st.integers(1, 2**32 - 1),
    "time": st.datetimes(datetime(1970, 1, 1), datetime(9999, 1, 1), timezones=st.just(UTC)),
}
EVENTS = st.one_of(
    st.builds(StateEvent, **COMMON, state=st.sampled_from(RunState), message=st.text()),
    st.builds(
        ProgressEvent,
        **COMMON,
        stage=st.text(),
        done=st.floats(allow_nan=False, allow_infinity=False),
        total=st.none() | st.floats(allow_nan=False, allow_infinity=False),
        unit=st.text(),
        eta_s=st.none() | st.floats(0, 1e9),
    ),
    st.builds(
        MetricEvent,
        **COMMON,
        step=st.integers(0, 2**32 - 1),
        values=st.dictionaries(st.text(), st.floats(allow_nan=False)),
    ),
    st.builds(LogEvent, **COMMON, level=st.sampled_from(LogLevel), text=st.text()),
    st.builds(CheckpointEvent, **COMMON, step=st.integers(0, 2**32 - 1), path=st.text()),
    st.builds(ArtifactEvent, **COMMON, kind=st.text(), path=st.text(), size_bytes=st.integers(0, 2**53)),
)


@given(EVENTS)
@settings(max_examples=150, deadline=None)
def test_events_survive_the_line_and_the_wire(event: RunEvent) -> None:
    line = event_to_line(event)
    assert line.count(b"\n") == 1
    assert event_from_line(line) == event
    assert event_from_proto(pb.RunEvent.FromString(event_to_proto(event).SerializeToString())) == event


def test_what_a_newer_gym_writes_is_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    time = "2026-11-27T12:00:00Z"
    lines = [
        {"sequence": 1, "time": time, "state": {"state": "RUN_STATE_DREAMING"}},
        {"sequence": 2, "time": time, "dream": {"about": "sheep"}},
        {"sequence": 3, "time": time, "log": {"level": "LOG_LEVEL_INFO", "text": "x", "colour": "red"}, "new": [1]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second, third = read_events(path)
    assert isinstance(first, StateEvent)
    assert first.state is None
    assert isinstance(second, UnknownEvent)
    assert isinstance(third, LogEvent)
    with EventWriter(path) as events:
        assert events.sequence == 3


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_some(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"garbage\n", *lines[3:]]))
    with pytest.raises(DataError, match=rf"{path}:3: not a run event"):
        list(read_events(path))
    path.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    with pytest.raises(DataError, match=rf"{path}:3: event 4 stands where event 3 belongs"):
        list(read_events(path))


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as events:
        events.state(RunState.TRAINING)
        with pytest.raises(OutputInUse, match="another process is writing this run"):
            EventWriter(path)
        events.state(RunState.SUCCEEDED)
    assert len(list(read_events(path))) == 2


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    real_write, calls = os.write, []

    def short_write(file: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real_write(file, data[:10])
        raise OSError(28, "No space left on device")

    with EventWriter(path) as events:
        events.log("info", "before")
        monkeypatch.setattr(os, "write", short_write)
        with pytest.raises(OSError, match="No space left"):
            events.log("info", "lost")
        monkeypatch.undo()
        events.log("info", "after")
    assert [event.text for event in read_events(path) if isinstance(event, LogEvent)] == ["before", "after"]


def test_a_follower_sees_every_event_once_across_a_torn_line(tmp_path: Path) -> None:
    path, seen, all_written = tmp_path / "events.jsonl", [], threading.Event()

    def follow() -> None:
        seen.extend(read_events(path, follow=True, stop=all_written.is_set, poll_s=0.001))

    follower = threading.Thread(target=follow)
    follower.start()
    for round_number in range(20):
        with EventWriter(path) as events:
            events.log("info", str(round_number))
        with path.open("ab") as file:
            file.write(b'{"sequence":')  # killed while writing
    all_written.set()
    follower.join(timeout=60)
    assert [event.sequence for event in seen] == list(range(1, 21))


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_killed_writer_leaves_whole_events(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    code = (
        "import sys\nfrom gym_sdk.events import EventWriter\n"
        "events = EventWriter(sys.argv[1])\nprint('ready', flush=True)\n"
        "while True: events.log('info', 'x' * 5000)\n"
    )
    total = 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        for event in read_events(path, after=total, follow=True, poll_s=0.001):
            if event.sequence >= total + 20:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        events = list(read_events(path))
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        assert len(events) >= total + 20
        total = len(events)
