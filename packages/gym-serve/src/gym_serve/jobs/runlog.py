"""Reads what a run appends to its event log, from where the last reading ended."""

from __future__ import annotations

import logging
from pathlib import Path

from google.protobuf import json_format

from gym_sdk._proto.gym.v1.events_pb2 import RunEvent

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 4 * 1024 * 1024
"""The most that one reading takes, so that a long log does not become one huge transaction."""


class RunLog:
    """The complete lines that were added to `events.jsonl` since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[tuple[int, float, bytes]]:
        """New events as (sequence in the run, time, serialized gym.v1.RunEvent). A torn last line is not read yet;
        a broken line further up, which a killed writer leaves, is passed over and logged."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read(_CHUNK_BYTES)
                if b"\n" not in text:
                    text += file.readline()
        except FileNotFoundError:
            return []
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [event for line in complete.splitlines() if (event := self._parse(line)) is not None]

    def _parse(self, line: bytes) -> tuple[int, float, bytes] | None:
        try:
            event = json_format.Parse(line, RunEvent(), ignore_unknown_fields=True)
        except (json_format.ParseError, UnicodeDecodeError):
            if line.strip():
                logger.warning("%s: passed over a broken line before byte %d", self._path, self._offset)
            return None
        return event.sequence, event.time.seconds + event.time.nanos / 1e9, event.SerializeToString()
