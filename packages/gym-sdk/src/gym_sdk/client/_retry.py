"""When a call is sent again, and how long to wait before. Pure: the clock and the waiting are the caller's."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from gym_sdk.client.errors import Aborted, LimitExceeded, RemoteError, TimedOut, Unavailable

FIRST_DELAY_S = 0.25
LARGEST_DELAY_S = 10.0

REFUSED_BEFORE_WORK = frozenset({"ENGINE_DOWN", "DRAINING", "RATE_LIMITED"})
"""With these reasons the daemon has done nothing, so that any call may be repeated."""


@dataclass(frozen=True)
class Repeat:
    """What is done about a call that may have been half done when its line broke."""

    most: int | None
    """How often it is sent again; None for as long as its deadline allows."""


SAFE = Repeat(most=None)
"""Reads, and creates that carry a request id: sending them twice does no more than sending them once."""
COSTLY = Repeat(most=2)
"""Generation: it changes nothing, but costs. As often as OpenAI's own client."""
UNSAFE = Repeat(most=0)
"""What changes something each time."""


class Backoff:
    """The waits between attempts: doubling, with full jitter, so that clients of a restarted daemon spread out."""

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self._jitter = jitter
        self._attempt = 0

    def reset(self) -> None:
        """The call got somewhere: the next wait is short again."""
        self._attempt = 0

    def next_delay_s(self, error: RemoteError) -> float:
        """How long to wait before the next attempt."""
        limit_s = min(LARGEST_DELAY_S, FIRST_DELAY_S * 2**self._attempt)
        self._attempt += 1
        own_s = limit_s * (0.5 + 0.5 * self._jitter())
        return max(own_s, error.retry_after_s or 0.0)


def may_repeat(error: RemoteError, repeat: Repeat, num_broken: int = 0) -> bool:
    """Whether a failed call may be sent again, when its line broke `num_broken` times before."""
    if was_not_begun(error):
        return True
    return isinstance(error, Unavailable) and (repeat.most is None or num_broken < repeat.most)


def was_not_begun(error: RemoteError) -> bool:
    """Whether the daemon has done nothing for the call: it refused it at once, or was never reached."""
    return error.reason in REFUSED_BEFORE_WORK or (isinstance(error, Unavailable) and error.never_sent)


def may_reconnect(error: RemoteError) -> bool:
    """Whether a broken stream with a cursor may be opened again."""
    if isinstance(error, LimitExceeded):
        return error.reason == "RATE_LIMITED"
    # A proxy that cuts long calls reports them as cancelled, as timed out, or as a fault of its own kind.
    return isinstance(error, Unavailable | TimedOut | Aborted) or (error.code == "UNKNOWN" and not error.reason)
