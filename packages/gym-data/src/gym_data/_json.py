"""JSON in and out without changing a value: orjson where it is exact, the standard library where it is not."""

from __future__ import annotations

import json
from typing import Any

import orjson

# orjson turns whole numbers beyond 64 bits into floats: with so many digits in a row, the standard library reads them.
# Mapping all digits to 0 and looking for nineteen of them is ten times as fast as a regular expression.
_DIGITS_TO_ZERO = bytes(ord("0") if ord("0") <= byte <= ord("9") else byte for byte in range(256))
_LONG = b"0" * 19
_QUOTE = b"\\u0022"


class RepeatedKey(ValueError):
    """A key that stands twice in one object, of which every reader of JSON keeps one value or the other."""


def loads(text: bytes | str) -> Any:
    """The value of JSON text. Raises ValueError (`lineno`, `colno`, `msg` where known), also for NaN and infinities,
    and RepeatedKey, one of them."""
    data = text if isinstance(text, bytes) else text.encode()
    if _LONG in data.translate(_DIGITS_TO_ZERO) or _QUOTE in data:
        return _loads_exactly(data)
    value = orjson.loads(data)
    # A key that is lost takes two quotes along; all others come back, as long as none is written as a number.
    if data.count(b'"') != orjson.dumps(value).count(b'"'):
        return _loads_exactly(data)
    return value


def _loads_exactly(data: bytes) -> Any:
    return json.loads(data, parse_constant=_refuse, parse_float=_finite, parse_int=_whole, object_pairs_hook=_object_of)


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise RepeatedKey(f'the key "{repeated}" stands twice in one object')
    return value


def dumps(value: Any) -> str:
    """Compact JSON text of a value."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # a whole number beyond 64 bits, or text that is not Unicode
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # Python reads no more than 4,300 digits
        raise ValueError(f"a number of {len(text)} digits is too long") from None


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text} is too large")
    return number
