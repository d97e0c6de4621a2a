"""Tells a run's story in two places at once: events.jsonl for programs, standard error for people."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from gym_sdk.cli import console
from gym_sdk.errors import GymError
from gym_sdk.events import EventWriter, LogLevel, RunState
from gym_sdk.rundir import RunDir
from gym_trainer.loop.interrupt import SIGNALS

_EVENT_INTERVAL_S = 1.0


class Narrator:
    """What a run says while it works."""

    def __init__(self, events: EventWriter, *, quiet: bool = False) -> None:
        """`quiet` keeps standard error empty; events are always written."""
        self.events = events
        self.quiet = quiet

    def state(self, state: RunState, message: str = "") -> None:
        """The run moved on."""
        self.events.state(state, message)

    def say(self, text: str = "") -> None:
        """A line for people only."""
        if not self.quiet:
            console.err(text)

    def log(self, level: LogLevel | str, text: str) -> None:
        """A line that is also kept with the run."""
        self.events.log(level, text)
        if not self.quiet:
            console.warn(text) if LogLevel(level) in (LogLevel.WARNING, LogLevel.ERROR) else console.err(text)

    @contextmanager
    def progress(self, stage: str, total: float | None, unit: str, label: str) -> Iterator[TwoFoldProgress]:
        """A piece of work, with the time left, from its first moment."""
        with ExitStack() as stack:
            shown = None if self.quiet else stack.enter_context(console.progress(total, unit, label))
            yield TwoFoldProgress(self.events, stage, total, unit, shown)

    @contextmanager
    def stages(self) -> Iterator[Callable[[str, int, int | None, str], None]]:
        """A callback `(stage, done, total, unit)` that opens a bar of its own for every stage it hears of."""
        with ExitStack() as stack:
            current: dict[str, Any] = {"stage": None, "progress": None}

            def report(stage: str, done: int, total: int | None, unit: str) -> None:
                if stage != current["stage"]:
                    stack.close()
                    current["stage"] = stage
                    current["progress"] = stack.enter_context(self.progress(_event_stage(stage), total, unit, stage))
                current["progress"].update(done, total)

            yield report


@contextmanager
def recording(run: RunDir, *, quiet: bool = False) -> Iterator[Narrator]:
    """The run's narrator; whatever ends the block early becomes the run's state before it goes on to the caller."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    on_main_thread = threading.current_thread() is threading.main_thread()
    # A terminal that goes away hangs up; under nohup that is ignored, and stays so.
    numbers = [number for number in SIGNALS if number != signal.SIGINT]
    heard = [number for number in numbers if on_main_thread and signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heard}
    with EventWriter(run.events_path) as events:
        try:
            yield Narrator(events, quiet=quiet)
        except GymError as error:
            events.state(RunState.FAILED, str(error))
            raise
        except KeyboardInterrupt:
            events.state(RunState.CANCELLED, f"interrupted; go on with: gym train --resume {run.path}")
            console.hint(f"go on with: gym train --resume {run.path}")
            raise
        except BaseException as error:
            events.state(RunState.FAILED, f"{type(error).__name__}: {error}")
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class TwoFoldProgress:
    """One piece of work, as events and as a bar."""

    def __init__(
        self, events: EventWriter, stage: str, total: float | None, unit: str, shown: console.Progress | None
    ) -> None:
        self._events, self._stage, self._total, self._unit, self._shown = events, stage, total, unit, shown
        self._done = 0.0
        self._first_done: float | None = None
        self._started_s = self._last_event_s = time.monotonic()
        events.progress(stage, 0, total, unit)

    def advance(self, amount: float = 1) -> None:
        """So much more is done."""
        self.update(self._done + amount)

    def update(self, done: float, total: float | None = None) -> None:
        """So much is done altogether. The time left is reckoned from what was done since the first update."""
        self._done, self._total = done, total if total is not None else self._total
        now_s = time.monotonic()
        if self._first_done is None:
            # A resumed run starts in the middle: what others did before says nothing about our speed.
            self._first_done, self._started_s = done, now_s
        finished = self._total is not None and done >= self._total
        if finished or now_s - self._last_event_s >= _EVENT_INTERVAL_S:
            self._last_event_s = now_s
            self._events.progress(self._stage, done, self._total, self._unit, eta_s=self._eta_s(now_s))
        if self._shown is not None:
            self._shown.update(done, self._total)

    def _eta_s(self, now_s: float) -> float | None:
        here = self._done - (self._first_done or 0.0)
        if self._total is None or here <= 0:
            return None
        return (now_s - self._started_s) / here * max(0.0, self._total - self._done)


def _event_stage(text: str) -> str:
    """`converting x.gguf (89 MB), once` is stage `convert` to a program."""
    first = text.split(maxsplit=1)[0].lower() if text.strip() else "work"
    return {"converting": "convert", "downloading": "download", "loading": "load"}.get(first, first)
