"""Events between plain values, protobuf messages and lines of events.jsonl."""

from __future__ import annotations

import json
import math
from datetime import UTC

from google.protobuf import json_format

from gym_sdk._proto.gym.v1 import events_pb2 as pb
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


def event_to_proto(event: RunEvent) -> pb.RunEvent:
    """The message of an event."""
    message = pb.RunEvent(sequence=event.sequence)
    message.time.FromDatetime(event.time.astimezone(UTC))
    match event:
        case StateEvent():
            state = "UNSPECIFIED" if event.state is None else event.state.name
            message.state.SetInParent()
            message.state.state = pb.RunState.Value(f"RUN_STATE_{state}")
            message.state.message = event.message
        case ProgressEvent():
            message.progress.CopyFrom(
                pb.ProgressEvent(
                    stage=event.stage, done=event.done, total=event.total, unit=event.unit, eta_s=event.eta_s
                )
            )
        case MetricEvent():
            message.metric.SetInParent()
            message.metric.step = event.step
            for name, value in event.values.items():
                message.metric.values[name].CopyFrom(metric_value(value))
        case LogEvent():
            message.log.level = pb.LogLevel.Value(f"LOG_LEVEL_{event.level.name}")
            message.log.text = event.text
        case CheckpointEvent():
            message.checkpoint.CopyFrom(pb.CheckpointEvent(step=event.step, path=event.path))
        case ArtifactEvent():
            message.artifact.CopyFrom(
                pb.ArtifactEvent(kind=event.kind, path=event.path, size_bytes=float(event.size_bytes))
            )
        case _:
            pass
    return message


def event_from_proto(message: pb.RunEvent) -> RunEvent:
    """The event of a message. What only a newer gym knows becomes UnknownEvent, or None in a known event."""
    sequence, time = message.sequence, message.time.ToDatetime(UTC)
    match message.WhichOneof("event"):
        case "state":
            name = _suffix(pb.RunState.DESCRIPTOR, message.state.state, "RUN_STATE_")
            state = RunState[name] if name in RunState.__members__ else None
            return StateEvent(sequence=sequence, time=time, state=state, message=message.state.message)
        case "progress":
            part = message.progress
            return ProgressEvent(
                sequence=sequence,
                time=time,
                stage=part.stage,
                done=part.done,
                total=part.total if part.HasField("total") else None,
                unit=part.unit,
                eta_s=part.eta_s if part.HasField("eta_s") else None,
            )
        case "metric":
            values = {name: metric_number(value) for name, value in message.metric.values.items()}
            return MetricEvent(sequence=sequence, time=time, step=message.metric.step, values=values)
        case "log":
            name = _suffix(pb.LogLevel.DESCRIPTOR, message.log.level, "LOG_LEVEL_")
            level = LogLevel[name] if name in LogLevel.__members__ else LogLevel.INFO
            return LogEvent(sequence=sequence, time=time, level=level, text=message.log.text)
        case "checkpoint":
            return CheckpointEvent(
                sequence=sequence, time=time, step=message.checkpoint.step, path=message.checkpoint.path
            )
        case "artifact":
            part = message.artifact
            return ArtifactEvent(
                sequence=sequence, time=time, kind=part.kind, path=part.path, size_bytes=int(part.size_bytes)
            )
        case _:
            return UnknownEvent(sequence=sequence, time=time)


def event_to_line(event: RunEvent) -> bytes:
    """One line of events.jsonl, with its line feed."""
    data = json_format.MessageToDict(event_to_proto(event), preserving_proto_field_name=True)
    if isinstance(event, MetricEvent) and event.values:
        # A protobuf map has no order of its own; people read this file.
        data["metric"]["values"] = {name: data["metric"]["values"][name] for name in event.values}
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def event_from_line(line: bytes) -> RunEvent:
    """The event of one line; fields that only a newer gym knows are left out. Raises ValueError."""
    try:
        message = json_format.Parse(line.decode("utf-8"), pb.RunEvent(), ignore_unknown_fields=True)
        return event_from_proto(message)
    except (json_format.ParseError, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(str(error)) from None


_NON_FINITE = {
    pb.NON_FINITE_UNSPECIFIED: math.nan,
    pb.NON_FINITE_NAN: math.nan,
    pb.NON_FINITE_POSITIVE_INFINITY: math.inf,
    pb.NON_FINITE_NEGATIVE_INFINITY: -math.inf,
}


def metric_value(value: float) -> pb.MetricValue:
    """The message of a number that may be outside of what JSON holds."""
    if math.isfinite(value):
        return pb.MetricValue(number=value)
    if math.isnan(value):
        return pb.MetricValue(non_finite=pb.NON_FINITE_NAN)
    return pb.MetricValue(non_finite=pb.NON_FINITE_POSITIVE_INFINITY if value > 0 else pb.NON_FINITE_NEGATIVE_INFINITY)


def metric_number(value: pb.MetricValue) -> float:
    """The number of a message."""
    return value.number if value.WhichOneof("value") == "number" else _NON_FINITE.get(value.non_finite, math.nan)


def _suffix(enum: object, number: int, prefix: str) -> str:
    found = enum.values_by_number.get(number)  # pyright: ignore[reportAttributeAccessIssue]
    return found.name.removeprefix(prefix) if found is not None else ""
