"""How much one key may ask for at once: calls a minute, and open streams."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gym_serve.auth import Key
from gym_serve.errors import Reason, ServiceError
from gym_serve.settings import LimitSettings


class RateLimiter:
    """A bucket of calls for each key: it holds a tenth of a minute's calls and fills evenly."""

    def __init__(self, limits: LimitSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, key: Key) -> None:
        """Counts one call. Raises `ServiceError` with the time after which the next one is let through."""
        per_minute = key.quota.max_requests_per_minute or self._limits.requests_per_minute
        capacity = max(1.0, per_minute / 10)
        now = self._clock()
        left, at = self._buckets.get(key.id, (capacity, now))
        left = min(capacity, left + (now - at) * per_minute / 60)
        if left < 1:
            self._buckets[key.id] = (left, now)
            raise ServiceError(
                Reason.RATE_LIMITED,
                f"this key may make {per_minute} calls a minute",
                retry_after_s=(1 - left) * 60 / per_minute,
            )
        self._buckets[key.id] = (left - 1, now)


class StreamLimiter:
    """Counts answers and event streams that are open."""

    def __init__(self, limits: LimitSettings) -> None:
        self._limits = limits
        self._open: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """All that are open now."""
        return self._open.total()

    @contextmanager
    def hold(self, key: Key) -> Iterator[None]:
        """One more stream for as long as the block runs. Raises `ServiceError` above the limits."""
        per_key = key.quota.max_concurrent_requests or self._limits.max_streams_per_key
        if self._open[key.id] >= per_key or self.num_open >= self._limits.max_streams:
            raise ServiceError(
                Reason.RATE_LIMITED,
                f"this key has {self._open[key.id]} requests open, of {per_key} that it may have"
                if self._open[key.id] >= per_key
                else f"the daemon has {self._limits.max_streams} requests open, as many as it takes",
                retry_after_s=1.0,
            )
        self._open[key.id] += 1
        try:
            yield
        finally:
            self._open[key.id] -= 1
            if not self._open[key.id]:
                del self._open[key.id]
