"""Waiting and working aside, as the blocking client does it. `_async/_primitives.py` is its twin."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep
from typing import ParamSpec, TypeVar

__all__ = ["sleep", "to_thread"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def to_thread(function: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
    """Nothing else waits for this thread: the work is done here."""
    return function(*args, **kwargs)
