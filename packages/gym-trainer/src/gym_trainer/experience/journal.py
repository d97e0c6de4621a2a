"""The journal: every request and answer of a run, append-only, on disk before the answer is used.

One JSON object a line:

    {"type": "journal", "format": "gym-journal/1"}
    {"type": "request", "key", "role", "purpose", "draw", "body", "reserved": {...}}   written before each attempt
    {"type": "lost", "key", "purpose", "why"}                  an attempt that may have been charged without an answer
    {"type": "refused", "key", "purpose"}                      an attempt that the endpoint did not work on
    {"type": "answer", "key", "purpose", "text", "finish_reason", "usage", "cost_usd", "busy_s"}
    {"type": "dropped", "key", "why"}                          a call given up on, for good
    {"type": "score", "key", "value" | "why"}                  a verdict of a reward that is not repeatable
    {"type": "cap", "purpose", "limit", "caps"}                a hard cap was reached

A key is the SHA-256 of role, model, body and draw, never of the endpoint's address: a run resumes on another port. An
answer is durable (fsync) before its caller sees it; answers that wait together share one fsync. A last line that a kill
tore is cut off when the journal is opened again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from gym_sdk.errors import OutputInUse, UserError, Where

FORMAT = "gym-journal/1"
Entry = dict[str, Any]


def request_key(role: str, body: dict[str, Any], draw: str) -> str:
    """The identity of a request. `draw` tells apart repeated samples of one prompt."""
    content = json.dumps([role, body, draw], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()


class Journal:
    """Appends durably, and looks up what a run already paid for."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self.entries: list[Entry] = []
        """What the file held when it was opened."""

        self.answers: dict[str, Entry] = {}
        self.dropped: dict[str, Entry] = {}
        self.scores: dict[str, Entry] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._writer: asyncio.Task[None] | None = None
        whole_bytes = self._load()
        self._file = None if read_only else self._open(whole_bytes)
        if self._file is not None and whole_bytes == 0:
            self._file.write(_line({"type": "journal", "format": FORMAT}))
            self._sync()

    def note(self, entry: Entry) -> None:
        """Append with the next answer's fsync. The kernel has it by then, so that only a power cut could lose it."""
        self._queue(entry, None)

    async def append(self, entry: Entry) -> None:
        """Append; returns when the entry is durable."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue(entry, future)
        await future

    async def close(self) -> None:
        """Write what waits, and close the file."""
        if self._writer is not None:
            await self._writer
        if self._file is not None:
            self._file.close()
            self._file = None

    def _queue(self, entry: Entry, future: asyncio.Future[None] | None) -> None:
        if self._file is None:
            raise RuntimeError("the journal is closed or read-only")
        self._remember(entry)
        # Written at once, so that a killed process loses nothing that was noted; synced in the writer below.
        self._file.write(_line(entry))
        self._file.flush()
        if future is not None:
            self._waiting.append(future)
            if self._writer is None or self._writer.done():
                self._writer = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(self._sync)
            except OSError as error:
                failure: OSError | None = error
            else:
                failure = None
            for future in batch:
                if future.done():
                    continue
                if failure is None:
                    future.set_result(None)
                else:
                    future.set_exception(failure)

    def _sync(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())

    def _open(self, whole_bytes: int) -> BinaryIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab")
        _lock(file, self.path)
        file.truncate(whole_bytes)
        return file

    def _load(self) -> int:
        """Read what is there; the number of bytes that make whole lines."""
        whole = 0
        for entry, end in self._read():
            if not self.entries and entry.get("format") != FORMAT:
                found = entry.get("format", "something else")
                raise UserError(f"holds {found}; this gym reads {FORMAT}", where=Where(file=str(self.path)))
            self.entries.append(entry)
            self._remember(entry)
            whole = end
        return whole

    def _read(self) -> Iterator[tuple[Entry, int]]:
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return
        start = 0
        while (end := raw.find(b"\n", start)) >= 0:
            try:
                entry = json.loads(raw[start:end])
            except ValueError:
                if raw.find(b"\n", end + 1) < 0:
                    return
                line = raw.count(b"\n", 0, start) + 1
                raise UserError(
                    "is damaged in the middle", where=Where(file=str(self.path), line=line), hint="restore the file"
                ) from None
            yield entry, end + 1
            start = end + 1

    def _remember(self, entry: Entry) -> None:
        match entry["type"]:
            case "answer":
                self.answers[entry["key"]] = entry
            case "dropped":
                self.dropped[entry["key"]] = entry
            case "score":
                self.scores[entry["key"]] = entry
            case _:
                pass


def _line(entry: Entry) -> bytes:
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _lock(file: BinaryIO, path: Path) -> None:
    """One process writes a journal: two would pay twice. Without file locks (Windows) the events' writer guards it."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise OutputInUse("another process runs this run", where=Where(file=str(path))) from None
