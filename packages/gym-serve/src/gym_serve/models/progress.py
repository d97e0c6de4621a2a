"""How long work on models reports what it does."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[str, int, int | None, str], None]
"""`(stage, done, total, unit)`: a readable stage (`converting SmolLM2.gguf`), and how much of it is done.

Called with `done=0` before the work starts, so that what is about to be downloaded or written, and how large it is,
is said first. `total` is None when it is not known; `unit` is `bytes` or `tensors`.
"""


def silent(stage: str, done: int, total: int | None, unit: str) -> None:
    """The default: say nothing."""


def human_size(size_bytes: int) -> str:
    """`89 MB`, `16.4 GB`: decimal units, as download pages show them."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
