"""Where an optimizer's work is done: after the backward pass or within it, its states on the device or in host memory.

Both are of full training, where gradients and states are several times the weights. What each of them saves, what it
costs, and why it is not to be had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gym_sdk.errors import UserError
from gym_sdk.spec.performance import why_not_in_backward, why_not_offloaded
from gym_trainer.fast.layers import decoder_layers
from gym_trainer.loop.host_states import NUM_UNDER_WAY
from gym_trainer.planning.decision import Part
from gym_trainer.planning.hardware import GIB, DtypeName, Hardware
from gym_trainer.planning.optimizer_states import sizes_by_weight

if TYPE_CHECKING:
    from torch import nn

    from gym_sdk.spec import RunSpec
    from gym_trainer.planning.memory import StaticMemory

_COPIES_BESIDE = 0.8
"""Of the time that states take over the link, both ways at once, what a step takes longer when weights move within its
backward pass (8B, AdamW, one H200: docs/performance.md)."""
_COPIES_WAITED_FOR = 1.7
"""The same for bitsandbytes, which waits for the device after every weight (8B and 32B, 8-bit AdamW)."""
_HOST_MARGIN = 0.95
"""Of the host's free memory that states may take."""
_FLOAT32_COPIES = {"adafactor": 4, "muon": 3, "galore_adamw": 3, "apollo_adamw": 3, "adamw_torch_8bit": 4}
"""Tensors of the largest weight's size in float32 that an update makes for a moment. The others have one kernel."""


@dataclass(frozen=True, kw_only=True)
class OptimizerPlace:
    """Where weights move, and where states wait."""

    in_backward: bool = False
    offload: bool = False


@dataclass(frozen=True, kw_only=True)
class PlaceReasons:
    """Why a place is not to be had on a device; None where it is."""

    in_backward: str | None
    offload: str | None

    @classmethod
    def of(
        cls, spec: RunSpec, hardware: Hardware, dtype: DtypeName, static: StaticMemory, *, packed: bool
    ) -> PlaceReasons:
        """From the specification, the device and what there would be to put."""
        in_backward = why_not_in_backward(spec)
        if in_backward is None and dtype == "float16":
            in_backward = "the loss scaler looks at every gradient before the first weight moves"
        if in_backward is None and not packed:
            in_backward = "rows are not packed: a step would be one padded micro-batch"
        offload = why_not_offloaded(spec)
        host = hardware.host_memory_bytes
        if offload is None and hardware.kind == "cpu":
            offload = "there is one memory"
        if offload is None and host is not None and static.optimizer > _HOST_MARGIN * host:
            offload = f"states of {static.optimizer / GIB:.1f} GiB, and {host / GIB:.1f} GiB of host memory are free"
        return cls(in_backward=in_backward, offload=offload)

    def places(self, spec: RunSpec) -> list[OptimizerPlace]:
        """Those that the specification lets a plan choose from, the plainest first.

        Raises:
            UserError: one was asked for that is not to be had.
        """
        asked = spec.performance
        for name, reason in (("optimizer_in_backward", self.in_backward), ("offload_optimizer", self.offload)):
            if getattr(asked, name) == "on" and reason is not None:
                raise UserError(f"performance.{name} is on: {reason}", hint=f"set performance.{name}=auto")
        return [
            OptimizerPlace(in_backward=in_backward, offload=offload)
            for offload in _choices(asked.offload_optimizer, self.offload)
            for in_backward in _choices(asked.optimizer_in_backward, self.in_backward)
        ]

    def parts(self, chosen: OptimizerPlace, memory_in_host: int) -> tuple[Part, Part]:
        """What a plan says about both."""
        return (
            _part(
                "optimizer in the backward pass",
                chosen.in_backward,
                "each weight moves when its gradient is whole; a step is one micro-batch",
                self.in_backward,
                "gradients fit into memory",
            ),
            _part(
                "optimizer states in host memory",
                chosen.offload,
                f"{memory_in_host / GIB:.1f} GiB, copied while other weights' gradients are computed",
                self.offload,
                "states fit into memory",
            ),
        )


def _choices(asked: str, reason: str | None) -> list[bool]:
    if asked == "on":
        return [True]
    return [False] if asked == "off" or reason is not None else [False, True]


def _part(name: str, is_on: bool, what: str, reason: str | None, not_needed: str) -> Part:
    if is_on:
        return Part(name=name, state="on", why=what)
    if reason is None:
        return Part(name=name, state="off", why=not_needed)
    applies = not reason.startswith(("the trained weights of adapter", "there is one memory"))
    return Part(name=name, state="off" if applies else "not applicable", why=reason)


@dataclass(frozen=True, kw_only=True)
class StatesUnderWay:
    """The most of states in host memory that are on the device at once: those of a few weights in a row."""

    within: int
    """While activations are held: of the head and of layers."""
    last: int
    """At the end, when the embedding moves, whose states may be the largest."""


def states_under_way(model: nn.Module, optimizer: str) -> StatesUnderWay:
    """`model` is a short one; weights move against the order of `parameters()`, where the embedding is the first."""
    sizes = [sum(size) for _, size in sizes_by_weight(optimizer, model, on_cuda=True)]
    windows = [sum(sizes[start : start + NUM_UNDER_WAY]) for start in range(len(sizes))]
    return StatesUnderWay(within=max(windows[1:], default=0), last=max(windows, default=0))


def gradients_in_backward(model: nn.Module, *, compiled: bool) -> int:
    """Gradients that are there beside the one that a simulation sees: a compiled layer gives all of its own at once."""
    if not compiled:
        return 0
    return max(sum(p.nbytes for p in layer.parameters() if p.requires_grad) for layer in decoder_layers(model))


def update_workspace(model: nn.Module, optimizer: str) -> int:
    """What moving the largest weight needs for a moment."""
    copies = _FLOAT32_COPIES.get(optimizer, 0)
    return copies * max((4 * p.numel() for p in model.parameters() if p.requires_grad), default=0)


def copies_time_s(place: OptimizerPlace, optimizer: str, static: StaticMemory, hardware: Hardware) -> float:
    """What copying states adds to a step."""
    if not place.offload:
        return 0.0
    waits = optimizer.endswith("_8bit") or optimizer in ("lion_32bit", "ademamix")
    share = _COPIES_WAITED_FOR if waits else _COPIES_BESIDE if place.in_backward else 1.0
    return share * static.optimizer / hardware.host_link_bytes_per_s
