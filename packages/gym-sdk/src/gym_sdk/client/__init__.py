"""The client of a Gym daemon.

from gym_sdk import Gym

with Gym() as gym:
    job = gym.jobs.create("run.yaml")
    for event in job.events(follow=True):
        print(event)
    job.wait().adapter.download("adapter")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gym_sdk.client._options import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES, SERVER_OPTIONS, local_key_path

if TYPE_CHECKING:
    from gym_sdk.client._async.gym import AsyncGym
    from gym_sdk.client._sync.gym import Gym
    from gym_sdk.client.settings import Settings, resolve_settings

__all__ = [
    "CHANNEL_OPTIONS",
    "MAX_MESSAGE_BYTES",
    "SERVER_OPTIONS",
    "AsyncGym",
    "Gym",
    "Settings",
    "local_key_path",
    "resolve_settings",
]

_HOME = {"AsyncGym": "_async.gym", "Gym": "_sync.gym", "Settings": "settings", "resolve_settings": "settings"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
