"""Gym's contract: the run specification, run events, and the client of a daemon. Nothing heavy loads before use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gym_sdk.client._async.gym import AsyncGym
    from gym_sdk.client._sync.gym import Gym
    from gym_sdk.errors import GymError
    from gym_sdk.events._read import read_events
    from gym_sdk.rundir import RunDir
    from gym_sdk.spec._load import load_spec
    from gym_sdk.spec.run import RunSpec

__all__ = ["AsyncGym", "Gym", "GymError", "RunDir", "RunSpec", "load_spec", "read_events"]

_HOME = {
    "AsyncGym": "client._async.gym",
    "Gym": "client._sync.gym",
    "GymError": "errors",
    "RunDir": "rundir",
    "RunSpec": "spec.run",
    "load_spec": "spec._load",
    "read_events": "events._read",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("gym-sdk")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
