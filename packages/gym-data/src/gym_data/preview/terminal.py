"""A row in the terminal: trained text in colour, or between marks where there is none."""

from __future__ import annotations

import os
import sys

from gym_data.report import Sample

_GREEN, _DIM, _RESET = "\x1b[30;42m", "\x1b[2m", "\x1b[0m"


def coloured(sample: Sample, *, colour: bool | None = None) -> str:
    """The row under its place. Without colour trained text stands between ⟦ and ⟧."""
    if colour is None:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    pieces = []
    for token in sample.tokens:
        # Control characters of the data must not reach the terminal.
        text = "".join(char if char.isprintable() or char in "\n\t" else f"\\x{ord(char):02x}" for char in token.text)
        if token.trained:
            pieces.append(_per_line(text, _GREEN) if colour else f"⟦{text}⟧")
        else:
            pieces.append(_per_line(text, _DIM) if colour else text)
    return f"── {sample.place}\n{''.join(pieces)}\n"


def _per_line(text: str, style: str) -> str:
    """Styles each line of its own, so that a background does not run on to the edge."""
    return "\n".join(f"{style}{line}{_RESET}" if line else "" for line in text.split("\n"))
