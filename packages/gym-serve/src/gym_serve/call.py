"""One call of a client, over whichever interface it came."""

from __future__ import annotations

from dataclasses import dataclass

from gym_serve.auth import Key


@dataclass(frozen=True, kw_only=True)
class Call:
    """Who calls, under which id, and until when."""

    key: Key
    request_id: str
    deadline: float | None = None
    """On `time.monotonic()`'s clock."""
