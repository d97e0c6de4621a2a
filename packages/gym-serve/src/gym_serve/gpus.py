"""Who uses which GPU: the engine and the jobs of one machine.

    reserve   the engine keeps the last GPU (the last `engine.num_gpus` under vLLM); jobs get the others
    yield     jobs go first: while one of them holds the engine's GPU, models are out of memory, and chats are refused
              with the time to try again; they come back when the job has ended
    share     both at once; whoever configured that has made sure that they fit

`auto` reserves where jobs have a GPU left, and yields on a machine with one: a plan that was made for the whole card
holds, and nobody's training dies of a chat. Indices are those of the devices that the daemon may see.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from gym_sdk.errors import UserError
from gym_serve.settings import Settings

Policy = Literal["reserve", "yield", "share"]


@dataclass(frozen=True, kw_only=True)
class GpuPlan:
    """How the GPUs of this machine are divided."""

    num_for_jobs: int
    """Jobs may use the GPUs 0 to n-1."""
    engine: tuple[int, ...]
    """What the engine uses; empty on a processor."""
    policy: Policy

    def must_yield(self, held: Collection[int]) -> bool:
        """Whether the engine has to be out of its memory while jobs hold these GPUs."""
        return self.policy == "yield" and not set(held).isdisjoint(self.engine)

    @property
    def device(self) -> str:
        """The engine's device, as `engine.device` names one."""
        return f"cuda:{self.engine[0]}" if self.engine else "cpu"


def plan_gpus(settings: Settings, num_visible: int) -> GpuPlan:
    """Divides the GPUs that the daemon may see. Raises UserError where the settings ask for more than there are."""
    plan = _plan_machine(settings, num_visible)
    if settings.jobs.launcher == "local":
        return plan
    assert settings.jobs.num_gpus != "auto", "refused with the settings"
    # Jobs hold GPUs of the cluster, so there is nothing to divide here.
    return replace(plan, num_for_jobs=settings.jobs.num_gpus, policy="share")


def _plan_machine(settings: Settings, num_visible: int) -> GpuPlan:
    engine, wanted = settings.engine, settings.jobs.num_gpus
    name, _, index = engine.device.partition(":")
    attached = engine.kind == "vllm" and bool(engine.vllm_url)  # its GPUs are whoever's runs it
    on_gpu = not attached and (name == "cuda" or (name == "auto" and num_visible > 0))
    if not on_gpu or (name == "cuda" and num_visible == 0):
        # `cuda` without a device is the engine's own error, which says what is missing.
        for_jobs = num_visible if wanted == "auto" else wanted
        return GpuPlan(num_for_jobs=for_jobs, engine=(0,) if name == "cuda" else (), policy="share")
    count = engine.num_gpus if engine.kind == "vllm" else 1
    if count > num_visible or (index and int(index) >= num_visible):
        raise UserError(f"the engine asks for {engine.device} and {count} GPUs; there are {num_visible}")
    first = int(index) if index else num_visible - count
    used = tuple(range(first, first + count))
    policy = engine.gpu_policy
    if policy == "auto":
        policy = "reserve" if first > 0 else "yield"
    if wanted != "auto":
        return GpuPlan(num_for_jobs=wanted, engine=used, policy="yield" if policy == "reserve" else policy)
    # Jobs get a range that begins at 0, so what is reserved is everything from the engine's first GPU on.
    return GpuPlan(num_for_jobs=first if policy == "reserve" else num_visible, engine=used, policy=policy)
