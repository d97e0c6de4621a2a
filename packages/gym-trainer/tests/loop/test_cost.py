"""Guards the cost of a run: all time of its processes at the price, through kills, in metrics, report and plan."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fitting import fit_tiny, tiny_spec

from gym_sdk.events import LogEvent, LogLevel, MetricEvent, RunEvent, RunState, StateEvent, read_events
from gym_trainer.loop import checkpoint
from gym_trainer.loop.cost import cost, running_time_s

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)


def at(minutes: float, state: RunState | None = None) -> RunEvent:
    time = NOON + timedelta(minutes=minutes)
    if state is None:
        return LogEvent(sequence=1, time=time, level=LogLevel.INFO, text="step")
    return StateEvent(sequence=1, time=time, state=state)


def test_the_time_between_two_processes_is_not_paid_and_lost_steps_are() -> None:
    first = [at(0, RunState.PREPARING), at(2, RunState.TRAINING), at(30)]
    second = [at(600, RunState.PREPARING), at(601, RunState.TRAINING), at(640, RunState.SUCCEEDED)]
    assert running_time_s([*first, *second]) == (30 + 40) * 60
    assert running_time_s([]) == 0
    assert cost(70 * 60, 3.0) == pytest.approx(3.5)


def costs(run_path: Path) -> list[float]:
    found = [event for event in read_events(run_path / "events.jsonl") if isinstance(event, MetricEvent)]
    return [event.values["cost"] for event in found if "cost" in event.values]


def test_each_step_says_what_the_run_has_cost_and_a_resumed_one_goes_on_from_there(tmp_path: Path) -> None:
    spec = tiny_spec(epochs=1, checkpoint_every_steps=3)
    spec = spec.model_copy(update={"output": spec.output.model_copy(update={"price_per_hour": 3600.0})})
    fit_tiny(tmp_path / "run", spec)
    whole = costs(tmp_path / "run")
    assert len(whole) == 6
    assert whole == sorted(whole)
    assert 0 < whole[0] < whole[-1]
    checkpoint.remove(tmp_path / "run" / "checkpoints" / "checkpoint-6")
    before = cost(running_time_s(read_events(tmp_path / "run" / "events.jsonl")), 3600.0)
    assert before > 0
    fit_tiny(tmp_path / "run", spec, resume=True)
    resumed = costs(tmp_path / "run")[6:]
    assert len(resumed) == 3
    assert resumed[0] > before


def test_without_a_price_nothing_is_said(tmp_path: Path) -> None:
    fit_tiny(tmp_path / "run", tiny_spec(epochs=1))
    assert costs(tmp_path / "run") == []
