"""JSON in and out without changing a value: orjson where it is exact, the standard library where it is not."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

# orjson turns whole numbers beyond 64 bits into floats, and exponents beyond a float's into infinity or an error.
_RISKY = re.compile(rb"[0-9]{19}|[eE]\+?[0-9]{3}")
_RISKY_TEXT = re.compile(_RISKY.pattern.decode())


def loads(text: bytes | str) -> Any:
    """The value of JSON text. Raises ValueError (`lineno`, `colno`, `msg` where known), also for NaN and infinities."""
    risky = _RISKY.search(text) if isinstance(text, bytes) else _RISKY_TEXT.search(text)
    return json.loads(text, parse_constant=_refuse, parse_float=_finite) if risky else orjson.loads(text)


def dumps(value: Any) -> str:
    """Compact JSON text of a value."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # a whole number beyond 64 bits, or text that is not Unicode
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text} is too large")
    return number
