"""Ctrl-C, SIGTERM and a lost terminal end a run at the next step with a checkpoint; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


class StopRequest:
    """While active, remembers that someone asked the process to stop.

    Signals reach the main thread only; elsewhere (a test, a notebook's worker) `request` does the same.
    """

    def __init__(self, on_request: Callable[[], None] = lambda: None) -> None:
        """`on_request` runs in the signal handler, once: to tell the user what will happen."""
        self.requested: bool = False
        self._on_request = on_request
        self._before: dict[int, Any] = {}

    def request(self) -> None:
        """Stop after the step under way."""
        if not self.requested:
            self.requested = True
            self._on_request()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup a hang-up is to be ignored
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.request()
