"""The nearest known names to one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> str | None:
    """`did you mean a, b?`, or None when nothing is near."""
    by_lower = {other.lower(): other for other in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=count, cutoff=0.6)
    return f"did you mean {', '.join(by_lower[match] for match in found)}?" if found else None
