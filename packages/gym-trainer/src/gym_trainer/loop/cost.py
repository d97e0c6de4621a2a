"""What a run has cost so far: the time in which a process of it ran, at a price an hour.

Everything counts that the machine is paid for: preparation, loading, evaluation, and steps that a killed process did
for nothing. The time between two processes does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from gym_sdk.events import RunEvent, RunState, StateEvent, read_events


def running_time_s(events: Iterable[RunEvent]) -> float:
    """From the first to the last event of each process; one begins with the state `preparing`."""
    total_s = 0.0
    began: datetime | None = None
    last: datetime | None = None
    for event in events:
        begins = isinstance(event, StateEvent) and event.state is RunState.PREPARING
        if begins and began is not None and last is not None:
            total_s += (last - began).total_seconds()
        if begins or began is None:
            began = event.time
        last = event.time
    if began is not None and last is not None:
        total_s += (last - began).total_seconds()
    return total_s


class CostMeter:
    """The cost so far of a run that goes on."""

    def __init__(self, events_path: Path, price_per_hour: float) -> None:
        self.price_per_hour = price_per_hour
        self._before_s = running_time_s(read_events(events_path))
        self._since = time.monotonic()

    def __call__(self) -> float:
        """In the currency of the price."""
        return cost(self._before_s + time.monotonic() - self._since, self.price_per_hour)


def cost(time_s: float, price_per_hour: float) -> float:
    """Of so much time."""
    return time_s * price_per_hour / 3600
