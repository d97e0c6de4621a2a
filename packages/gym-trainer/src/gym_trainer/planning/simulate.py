"""A step of training on tensors without data: what it would hold in memory, and what it would compute and move.

The code that trains is run on PyTorch's meta device, where a tensor has a shape and no bytes. Every operation is seen
on its way, in the forward pass and in the backward pass, so memory and work follow from the real code of the model
and of the fast path instead of from formulas beside it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_BLOCK_BYTES = 512  # CUDA's caching allocator rounds each allocation up to this


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of an operator."""

    name: str
    dtype: torch.dtype
    flops: float
    """Of matrix products and attention; 0 for everything else."""
    num_bytes: int
    """Read and written, each tensor once."""


@dataclass
class Trace:
    """What a simulated piece of work did."""

    operations: list[Operation] = field(default_factory=list)
    peak_bytes: int = 0
    """The most alive at once, of what was made inside."""
    marks: dict[str, int] = field(default_factory=dict)
    """Bytes alive at the places that `Simulator.mark` named."""
    operations_before: dict[str, int] = field(default_factory=dict)
    """How many operations had been made there."""

    @property
    def flops(self) -> float:
        return sum(operation.flops for operation in self.operations)

    @property
    def num_bytes(self) -> int:
        return sum(operation.num_bytes for operation in self.operations)


class Simulator(TorchDispatchMode):
    """Records the operations made while it is entered. Tensors made before are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: Trace = Trace()
        self._alive: dict[int, tuple[int, weakref.ref]] = {}
        self._bytes = 0

    def mark(self, name: str) -> None:
        """Remember the bytes alive now, and what was done so far."""
        self.trace.marks[name] = self._bytes
        self.trace.operations_before[name] = len(self.trace.operations)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        # an output in an input's storage is a view, or what was written in place
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        made = [t for t in outputs if t.untyped_storage()._cdata not in given and self._track(t)]
        if made or _writes(func):
            self._record(func, args, kwargs, out, inputs, outputs)
        return out

    def _track(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or tensor.device.type != "meta":
            return False
        size = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES

        def forget(_: Any) -> None:
            self._bytes -= self._alive.pop(key)[0]

        self._alive[key] = (size, weakref.ref(storage, forget))
        self._bytes += size
        self.trace.peak_bytes = max(self.trace.peak_bytes, self._bytes)
        return True

    def _record(
        self, func: Any, args: Any, kwargs: Any, out: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        count: Callable[..., float] | None = flop_registry.get(func._overloadpacket)
        flops = float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0
        # what an in-place operation writes is among its inputs and outputs: read and written
        self.trace.operations.append(
            Operation(
                name=str(func._overloadpacket),
                dtype=(inputs or outputs)[0].dtype,
                flops=flops,
                num_bytes=sum(_touched_bytes(tensor) for tensor in (*inputs, *outputs)),
            )
        )


def _writes(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _touched_bytes(tensor: torch.Tensor) -> int:
    """A broadcast tensor is read once however often it is repeated."""
    num_elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        num_elements *= size if stride else 1
    return num_elements * tensor.element_size()
