"""How transfers tell how far they are."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


def quiet(done: int, total: int) -> None:
    """Nobody wants to know."""
