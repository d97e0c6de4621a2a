"""Reading events.jsonl, also while it grows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gym_sdk.errors import DataError, Where
from gym_sdk.events._convert import event_from_line
from gym_sdk.events._types import RunEvent


def read_events(
    path: str | os.PathLike[str],
    after: int = 0,
    *,
    follow: bool = False,
    stop: Callable[[], bool] | None = None,
    poll_s: float = 0.2,
) -> Iterator[RunEvent]:
    """The events after the sequence number `after`, in order.

    A torn last line is not an event yet. With `follow`, waits for more (looking every `poll_s` seconds, also for a
    file that does not exist yet) until `stop()` is true, and then yields what was written until that moment.

    Raises DataError, with the line, where a complete line is not an event or the sequence has a gap.
    """
    file, offset, sequence = Path(path), 0, 0
    while True:
        ended = not follow or (stop is not None and stop())
        for line in _complete_lines(file, offset):
            offset += len(line)
            sequence += 1
            if sequence > after:
                yield _event(line, sequence, file)
        if ended:
            return
        time.sleep(poll_s)


def _complete_lines(file: Path, offset: int) -> Iterator[bytes]:
    """Each complete line from `offset` on, with its line feed."""
    try:
        stream = file.open("rb")
    except FileNotFoundError:
        return
    with stream:
        stream.seek(offset)
        for line in stream:
            if not line.endswith(b"\n"):
                # Not kept: a writer that resumes cuts a torn line off and writes another in its place.
                return
            yield line


def _event(line: bytes, number: int, file: Path) -> RunEvent:
    try:
        event = event_from_line(line)
    except ValueError as error:
        raise DataError(f"not a run event: {error}", where=Where(file=str(file), line=number)) from None
    if event.sequence != number:
        raise DataError(
            f"event {event.sequence} stands where event {number} belongs", where=Where(file=str(file), line=number)
        )
    return event
