"""The plan of a run: what was chosen, why, and what is expected of it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

from gym_trainer.planning.hardware import DtypeName
from gym_trainer.planning.memory import MemoryPlan

PLAN_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the fast path."""

    name: str
    state: Literal["on", "off", "not applicable"]
    why: str
    """For `off` and `not applicable` the reason; for `on` what it does."""


@dataclass(frozen=True, kw_only=True)
class DataShape:
    """What a plan needs to know of the rows."""

    num_rows: int
    num_tokens: int
    longest_row_tokens: int
    shared_tokens: int = 0
    """Of `num_tokens`, those that a row's later documents have in common with the first: they may be computed once."""
    longest_step_tokens: int | None = None
    """Of any step of the run, where its order is known."""

    @property
    def mean_row_tokens(self) -> int:
        return max(1, round(self.num_tokens / self.num_rows))

    @property
    def mean_row_positions(self) -> int:
        """Of the model's row that a row of the data takes."""
        return max(1, round((self.num_tokens - self.shared_tokens) / self.num_rows))


@dataclass(frozen=True, kw_only=True)
class SpeedPlan:
    """What is expected of one micro-batch and of the whole run."""

    flops_per_token: float
    """Forward and backward, recomputation left out: what utilisation counts."""
    peak_flops_per_s: float
    micro_batch_time_s: float
    optimizer_time_s: float
    """Of one optimizer step."""
    throughput_tokens_per_s: float
    """With the optimizer's share."""
    model_flops_utilisation: float


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The whole run, where the data is known."""

    num_steps: int
    num_tokens: int
    time_s: float
    cost: float | None
    """In the currency of the price that was given."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """Another device that would do."""

    device: str
    throughput_tokens_per_s: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is decided before weights load. `gym train` applies it as it stands."""

    version: int = PLAN_VERSION
    device: Literal["cpu", "cuda"]
    hardware: str
    num_threads: int | None
    """Of a processor; None on a card."""
    dtype: DtypeName
    num_weights: int
    num_trained: int
    attention: str
    """The name under transformers' attention interface."""
    packed: bool
    shared_prompts: bool = False
    """What a pair's answers begin with alike is computed once."""
    micro_batch_tokens: int
    """Positions of the model's row."""
    num_layers: int
    recompute_layers: int
    offload: bool = False
    """The inputs of recomputed layers wait in host memory."""
    optimizer_in_backward: bool = False
    """Each weight moves in the backward pass; a step is one micro-batch."""
    offload_optimizer: bool = False
    """The optimizer's states wait in host memory."""
    loss_chunk_size: int | None
    compile: bool
    """Each decoder layer compiled."""
    fused: bool = False
    """Each decoder layer's forward and backward written out (`gym_trainer.fast.fused`)."""
    memory: MemoryPlan
    speed: SpeedPlan
    run: RunPlan | None
    parts: tuple[Part, ...]
    smaller: Option | None = None
    """The smallest card of the table that would do."""

    def to_json(self) -> str:
        """For plan.json; `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote. Keys of a later version that are unknown here are passed over."""
        data: dict[str, Any] = json.loads(text)
        known = {field.name for field in dataclasses.fields(cls)}
        data = {name: value for name, value in data.items() if name in known}
        data["memory"] = MemoryPlan(**data["memory"])
        data["speed"] = SpeedPlan(**data["speed"])
        data["run"] = RunPlan(**data["run"]) if data.get("run") else None
        data["smaller"] = Option(**data["smaller"]) if data.get("smaller") else None
        data["parts"] = tuple(Part(**part) for part in data["parts"])
        return cls(**data)
