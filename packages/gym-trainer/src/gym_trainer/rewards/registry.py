"""From a reward's specification to the reward, by entry points of the group `gym.rewards`.

Gym's own rewards are registered the same way, under their kinds. The object behind an entry point is called with the
reward's specification; another package's gets a `PluginReward`, whose `options` are its own.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from gym_sdk.errors import GymError, SpecError, Where
from gym_sdk.spec.rewards import PluginReward, RewardSpec
from gym_trainer.rewards.base import Reward

GROUP = "gym.rewards"


def registered_rewards() -> dict[str, EntryPoint]:
    """The rewards that installed packages register, by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def build_reward(spec: RewardSpec) -> Reward:
    """The reward that a specification describes. Raises SpecError or MissingExtra; no call has been made by then."""
    known = registered_rewards()
    plugin = isinstance(spec, PluginReward)
    name = spec.name if plugin else spec.kind
    where = Where(path="method.reward.name" if plugin else "method.reward.kind")
    if name not in known:
        names = ", ".join(sorted(known)) or "none"
        raise SpecError(f"no installed package registers a reward {name!r}", where=where, hint=f"known: {names}")
    if plugin and known[name].value.startswith("gym_trainer."):
        raise SpecError(f"{name!r} is one of Gym's own rewards", where=where, hint=f"reward: {{kind: {name}}}")
    try:
        reward = known[name].load()(spec)
    except GymError:
        raise
    except Exception as error:  # noqa: BLE001 - another package's code may raise anything
        raise SpecError(f"the reward {name!r} cannot be built: {type(error).__name__}: {error}", where=where) from None
    if not isinstance(reward, Reward):
        missing = [part for part in ("repeatable", "score", "check", "extract", "close") if not hasattr(reward, part)]
        raise SpecError(f"the reward {name!r} is not one: it has no {', '.join(missing)}", where=where)
    return reward
