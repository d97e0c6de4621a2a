"""Rate limits of an endpoint: never more than so many requests and tokens in any minute."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

WINDOW_S = 60.0

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


class RateLimit:
    """A sliding window over one quantity. Callers wait in the order in which they came."""

    def __init__(
        self, per_minute: float | None, *, clock: Clock = time.monotonic, sleep: Sleep = asyncio.sleep
    ) -> None:
        self._per_minute, self._clock, self._sleep = per_minute, clock, sleep
        self._window: deque[tuple[float, float]] = deque()
        self._turn = asyncio.Lock()

    async def acquire(self, amount: float) -> None:
        """Wait until `amount` fits into the last minute. More than the limit itself waits for an empty window."""
        if self._per_minute is None:
            return
        async with self._turn:
            while True:
                now = self._clock()
                while self._window and self._window[0][0] <= now - WINDOW_S:
                    self._window.popleft()
                if not self._window or sum(a for _, a in self._window) + amount <= self._per_minute:
                    break
                await self._sleep(self._window[0][0] + WINDOW_S - now)
            self._window.append((now, amount))
