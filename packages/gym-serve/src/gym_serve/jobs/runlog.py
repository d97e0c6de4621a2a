"""Reads what a run appends to its event log, from where the last reading ended."""

from __future__ import annotations

import logging
from pathlib import Path

from google.protobuf import json_format

from gym_sdk._proto.gym.v1.events_pb2 import RunEvent

logger: logging.Logger = logging.getLogger(__name__)

_CHUNK_BYTES = 4 * 1024 * 1024
"""The most that one reading takes, so that a long log does not become one huge transaction."""


class RunLog:
    """The complete lines that were added to `events.jsonl` since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[RunEvent]:
        """New events. A torn last line is not read yet; a broken line further up is passed over and logged."""
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

    def _parse(self, line: bytes) -> RunEvent | None:
        try:
            return json_format.Parse(line, RunEvent(), ignore_unknown_fields=True)
        except (json_format.ParseError, UnicodeDecodeError):
            logger.warning("%s: passed over a broken line before byte %d", self._path, self._offset)
            return None
