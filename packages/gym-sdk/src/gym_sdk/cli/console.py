"""What commands show: data on standard output, everything else on standard error.

Colour and moving bars only on a terminal that has them (rich keeps to NO_COLOR and TERM); a line every few seconds
otherwise, so that a log file stays readable.
"""

from __future__ import annotations

import json as _json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

PLAIN_INTERVAL_S = 5.0
"""Between two lines of progress where there is no terminal."""

SIZE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def out(text: str = "") -> None:
    """A line of data."""
    sys.stdout.write(f"{text}\n")


def out_json(data: Any) -> None:
    """Data for scripts: one JSON document."""
    sys.stdout.write(_json.dumps(data, ensure_ascii=False, indent=2, allow_nan=False) + "\n")


def err(text: str = "") -> None:
    """A line of log."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def warn(text: str) -> None:
    """A line that the user should not miss."""
    err(f"warning: {text}")


def hint(text: str) -> None:
    """The next step."""
    err(f"hint: {text}")


def is_terminal() -> bool:
    """Whether standard error can show moving text."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class Progress(Protocol):
    """A piece of work under way."""

    def advance(self, amount: float = 1) -> None:
        """So much more is done."""

    def update(self, done: float, total: float | None = None) -> None:
        """So much is done altogether; `total` where it has become known."""


@contextmanager
def progress(total: float | None, unit: str, label: str) -> Iterator[Progress]:
    """Show progress with the time left: a bar on a terminal, else a line at the start, every few seconds, at the end.

    `total` is None where the end is not known. The unit `bytes` is shown as MB and GB.
    """
    if is_terminal():
        with _bar(total, unit, label) as bar:
            yield bar
        return
    lines = PlainProgress(total, unit, label)
    try:
        yield lines
    finally:
        lines.finish()


class PlainProgress:
    """Progress as lines of text."""

    def __init__(
        self,
        total: float | None,
        unit: str,
        label: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] = err,
    ) -> None:
        self._total, self._unit, self._label = total, unit, label
        self._clock, self._write = clock, write
        self._done = 0.0
        self._started_s = self._last_line_s = clock()
        self._say()

    def advance(self, amount: float = 1) -> None:
        """So much more is done."""
        self.update(self._done + amount)

    def update(self, done: float, total: float | None = None) -> None:
        """So much is done altogether."""
        self._done = done
        self._total = total if total is not None else self._total
        if self._clock() - self._last_line_s >= PLAIN_INTERVAL_S:
            self._say()

    def finish(self) -> None:
        """The last line, with the time it took."""
        took = format_duration(self._clock() - self._started_s)
        self._write(f"{self._label}: {format_amount(self._done, self._total, self._unit)}, took {took}")

    def _say(self) -> None:
        now_s = self._last_line_s = self._clock()
        text = f"{self._label}: {format_amount(self._done, self._total, self._unit)}"
        if self._total and self._done:
            left_s = (now_s - self._started_s) / self._done * max(0.0, self._total - self._done)
            text += f", {format_duration(left_s)} left"
        self._write(text)


@contextmanager
def _bar(total: float | None, unit: str, label: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(label, total=total, amount=format_amount(0, total, unit))

        def show(done: float, total: float | None) -> None:
            bars.update(task, completed=done, total=total, amount=format_amount(done, total, unit))

        yield _Bar(total, show)


class _Bar:
    """Progress as a bar that moves."""

    def __init__(self, total: float | None, show: Callable[[float, float | None], None]) -> None:
        self._done, self._total, self._show = 0.0, total, show

    def advance(self, amount: float = 1) -> None:
        self.update(self._done + amount)

    def update(self, done: float, total: float | None = None) -> None:
        self._done = done
        self._total = total if total is not None else self._total
        self._show(self._done, self._total)


def format_amount(done: float, total: float | None, unit: str) -> str:
    """`3/10 steps`, `12 rows`, `1.2/4.0 GB`."""
    if unit == "bytes":
        largest = total if total is not None else done
        scale, name = next((pair for pair in SIZE_UNITS if largest >= pair[0]), (1, "bytes"))
        digits = 0 if scale == 1 else 1
        of = "" if total is None else f"/{total / scale:.{digits}f}"
        return f"{done / scale:.{digits}f}{of} {name}"
    of = "" if total is None else f"/{total:,.0f}"
    return f"{done:,.0f}{of} {unit}".rstrip()


def format_size(size_bytes: float) -> str:
    """`89.1 MB`; decimal units, as disks and downloads are counted."""
    return format_amount(size_bytes, None, "bytes")


def format_duration(seconds: float) -> str:
    """`8 s`, `2 min 5 s`, `3 h 20 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
