"""What a reward is, and how one fails."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from gym_sdk.errors import GymError


@runtime_checkable
class Reward(Protocol):
    """Verifies answers. Instances may be used from one thread at a time."""

    repeatable: bool
    """Whether equal arguments always give an equal score, quickly. A run keeps the scores of those that are not in its
    journal, so that a replay finds them there."""

    def score(self, answer: str, reference: str, question: str) -> float:
        """The reward of an answer, from 0 to 1.

        Raises RewardTimeout when it takes too long, RewardFailed when it cannot tell. Neither is a reward of 0.
        """
        ...

    def check(self, reference: str) -> str | None:
        """Why a reference cannot be compared with; None when it can. Asked for every row before any call is made."""
        ...

    def extract(self, answer: str) -> str | None:
        """The answer's comparable part in one spelling, for majority votes; None where there is none."""
        ...

    def close(self) -> None:
        """Free what the reward holds."""
        ...


class RewardTimeout(GymError):
    """An answer took longer to verify than allowed. It has no reward."""


class RewardFailed(GymError):
    """A reward raised, or returned something that is no reward: a fault to repair, not a bad answer."""
