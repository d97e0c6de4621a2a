"""Run events: what the trainer writes to events.jsonl and everyone else follows.

with EventWriter(run.events_path) as events:
    events.state(RunState.TRAINING)
    events.metric(step=10, values={"loss": 1.25})

for event in read_events(run.events_path, after=last_seen):
    if isinstance(event, MetricEvent):
        print(event.step, event.values["loss"])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    UnknownEvent,
)

if TYPE_CHECKING:
    from gym_sdk.events._convert import event_from_proto, event_to_proto
    from gym_sdk.events._read import read_events
    from gym_sdk.events._write import EventWriter

__all__ = [
    "ArtifactEvent",
    "CheckpointEvent",
    "EventWriter",
    "LogEvent",
    "LogLevel",
    "MetricEvent",
    "ProgressEvent",
    "RunEvent",
    "RunState",
    "StateEvent",
    "UnknownEvent",
    "event_from_proto",
    "event_to_proto",
    "read_events",
]

_HOME = {
    "EventWriter": "_write",
    "event_from_proto": "_convert",
    "event_to_proto": "_convert",
    "read_events": "_read",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
