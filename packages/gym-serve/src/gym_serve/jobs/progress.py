"""Where a run stands, folded from its events, so that looking at a job costs the same however long it has run."""

from __future__ import annotations

from collections.abc import Iterable

from gym_sdk._proto.gym.v1.events_pb2 import RunEvent
from gym_sdk._proto.gym.v1.jobs_pb2 import JobProgress


def advance(progress: bytes, events: Iterable[RunEvent]) -> bytes:
    """A serialized gym.v1.JobProgress, brought up to date."""
    message = JobProgress.FromString(progress)
    for event in events:
        match event.WhichOneof("event"):
            case "state":
                message.run_state = event.state.state
            case "metric":
                message.step = max(message.step, event.metric.step)
                for name, value in event.metric.values.items():
                    message.metrics[name].CopyFrom(value)
            case "progress" if event.progress.stage == "train":
                if event.progress.HasField("total"):
                    message.num_steps = max(0, int(event.progress.total))
                message.step = max(message.step, int(event.progress.done))
                if event.progress.HasField("eta_s"):
                    message.eta_s = event.progress.eta_s
            case _:
                pass
    return message.SerializeToString()


def num_tokens(event: RunEvent) -> int:
    """The tokens computed on since the metric event before this one."""
    if "num_tokens" not in event.metric.values:
        return 0
    return int(event.metric.values["num_tokens"].number)
