"""What a run holds at once, before any of it is there.

Static memory (weights, gradients, optimizer states) is counted from parameters; activations, the loss and everything
that lives for a moment come from simulated micro-batches (`gym_trainer.planning.simulate`).

Legend: n layers, r of them recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gym_trainer.planning.hardware import MIB, Hardware, process_bytes
from gym_trainer.planning.optimizer_states import state_sizes

if TYPE_CHECKING:
    from torch import nn

CUDA_CONTEXT_BYTES = 600 * MIB  # the driver's, outside the allocator
_PRODUCT_WORKSPACE_BYTES = 64 * MIB
"""What matrix products allocate for themselves, and the parts of sums over tokens."""
_FRAGMENTATION = 0.03


@dataclass(frozen=True, kw_only=True)
class StaticMemory:
    """What stays from step to step, in bytes."""

    frozen_weights: int
    trained_weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.frozen_weights + self.trained_weights + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The most a run holds, by what holds it, in bytes."""

    weights: int
    """The model's, and the adapter's."""
    gradients: int
    optimizer: int
    activations: int
    """What layers keep for the backward pass."""
    workspace: int
    """The loss, and what lives for a moment: at the peak beyond what is kept."""
    overhead: int
    """Of the process or the CUDA context, and lost between blocks."""
    limit: int
    """What there is."""
    method: int = 0
    """What is held beside the model, such as a teacher and frozen adapters."""
    optimizer_in_host: int = 0
    """States that wait in host memory, beside all this."""

    @property
    def total(self) -> int:
        return self.allocated + self.overhead

    @property
    def allocated(self) -> int:
        """What PyTorch counts as allocated at the peak."""
        kept = self.weights + self.gradients + self.optimizer + self.method
        return kept + self.activations + self.workspace

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


def static_memory(
    short: nn.Module, long: nn.Module, num_extra: float, optimizer: str, *, on_cuda: bool = False
) -> StaticMemory:
    """From a short model and one with a pattern more, `num_extra` patterns beyond the short one."""
    frozen, trained = (
        _extrapolate(_bytes(short, trained=kind), _bytes(long, trained=kind), num_extra) for kind in (False, True)
    )
    first, second = (optimizer_bytes(model, optimizer, on_cuda=on_cuda) for model in (short, long))
    return StaticMemory(
        frozen_weights=frozen,
        trained_weights=trained,
        gradients=trained,
        optimizer=_extrapolate(first, second, num_extra),
    )


def optimizer_bytes(model: nn.Module, optimizer: str, *, on_cuda: bool = False) -> int:
    """The optimizer's states on the device, as the allocator holds them."""
    return sum(_in_blocks(size) for size in state_sizes(optimizer, model, on_cuda=on_cuda))


def _in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // 512) * 512


def _extrapolate(short: float, long: float, num_extra: float) -> int:
    return int(short + (long - short) * num_extra)


def _bytes(model: nn.Module, *, trained: bool) -> int:
    """Tied parameters count once: `parameters()` gives each of them once."""
    parameters = sum(_in_blocks(p.nbytes) for p in model.parameters() if p.requires_grad == trained)
    return parameters + (0 if trained else sum(buffer.nbytes for buffer in model.buffers()))


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Bytes of simulated micro-batches, as straight lines in the number of layers."""

    kept_base: int
    """The peak without layers, when every layer keeps its activations."""
    kept_per_layer: int
    recomputed_base: int = 0
    """The same when every layer is recomputed: with one layer's second pass in it. 0 where that was not simulated."""
    recomputed_per_layer: int = 0

    def peak(self, num_layers: int, num_recomputed: int, *, late_bytes: int = 0) -> int:
        """The most alive at once in a micro-batch, the first `num_recomputed` layers recomputed.

        At the loss everything is held. When the backward pass reaches a recomputed layer, the kept ones, which come
        after it, have been given back; `late_bytes` (gradients) are there by then, and at the end.
        """
        recomputed = self.recomputed_per_layer * num_recomputed
        kept = self.kept_per_layer * (num_layers - num_recomputed)
        at_loss = self.kept_base + kept + recomputed if num_recomputed < num_layers else 0
        at_recomputation = self.recomputed_base + recomputed + late_bytes if num_recomputed else 0
        at_end = (min(self.kept_base, self.recomputed_base) if num_recomputed else self.kept_base) + late_bytes
        return max(at_loss, at_recomputation, at_end)

    def activations(self, num_layers: int, num_recomputed: int) -> int:
        """What layers hold from the forward to the backward pass."""
        return self.kept_per_layer * (num_layers - num_recomputed) + self.recomputed_per_layer * num_recomputed


def overhead(hardware: Hardware, allocated: int) -> int:
    """Memory that is neither tensors nor workspace: the CUDA context and lost blocks, or the process itself."""
    if hardware.kind == "cuda":
        return CUDA_CONTEXT_BYTES + int(_FRAGMENTATION * allocated)
    return process_bytes()


def product_workspace(hardware: Hardware) -> int:
    """Bytes beside the tensors that a simulation sees."""
    return _PRODUCT_WORKSPACE_BYTES if hardware.kind == "cuda" else 0
