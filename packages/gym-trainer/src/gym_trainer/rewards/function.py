"""A reward that is a Python function of the user's: operator-trusted code, run in this process."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from gym_sdk.errors import SpecError, Where
from gym_sdk.spec.rewards import PythonReward
from gym_trainer.rewards.base import RewardFailed

WHERE = Where(path="method.reward.function")


class Function:
    """Calls `function(answer, reference, question)`."""

    repeatable = False

    def __init__(self, spec: PythonReward) -> None:
        self._name = spec.function
        self._function = _load(spec.function)

    def check(self, reference: str) -> str | None:
        return None

    def extract(self, answer: str) -> str | None:
        return None

    def score(self, answer: str, reference: str, question: str) -> float:
        try:
            value = self._function(answer, reference, question)
        except Exception as error:
            raise RewardFailed(f"{self._name} raised {type(error).__name__}: {error}") from error
        return as_reward(value, self._name)

    def close(self) -> None:
        """Nothing is held."""


def as_reward(value: Any, name: str) -> float:
    """A number from 0 to 1. Raises RewardFailed for anything else: a reward out of range would bend every mean."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0.0 <= number <= 1.0:
        raise RewardFailed(f"{name} returned {value!r}; a reward is a number from 0 to 1")
    return number


def _load(name: str) -> Callable[[str, str, str], Any]:
    module_name, function_name = name.split(":")
    # A function beside the specification is found as `python script.py` would find it.
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything while it is imported
        raise SpecError(
            f"{module_name} cannot be imported: {type(error).__name__}: {error}",
            where=WHERE,
            hint=f"modules are looked for in the installed packages and in {folder}",
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise SpecError(f"{module_name} has no function {function_name}", where=WHERE)
    return function
