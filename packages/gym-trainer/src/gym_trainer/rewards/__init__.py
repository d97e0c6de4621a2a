"""Rewards: how an answer is verified against a reference, as a number from 0 to 1.

    reward = build_reward(NumericReward(absolute_tolerance=0.01))
    reward.score("The ratio is 1,234.50", "1234.5", question)  # 1.0

Another package adds a reward by an entry point of the group `gym.rewards` whose object is called with the options of
the specification and returns a `Reward`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gym_trainer.rewards.base import Reward, RewardFailed, RewardTimeout
    from gym_trainer.rewards.registry import build_reward

_HOME = {"Reward": "base", "RewardFailed": "base", "RewardTimeout": "base", "build_reward": "registry"}

__all__ = ["Reward", "RewardFailed", "RewardTimeout", "build_reward"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
