"""An optimizer's states in host memory, on the device only while their weight moves.

States of one weight come in while the one before it moves, and go out while the next one does, on streams of their own.
The order in which weights move is that of the step before. The host waits for what went out two weights ago: without
that it would run ahead, and the device would hold the states of every weight that it has not come to yet.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

FEWEST_NUMBERS = 65_536
"""Smaller tensors stay on the device: their copies would cost more than they free."""
NUM_UNDER_WAY = 4
"""Weights whose states are on the device at once: the one that moves, the next, and two on their way out."""

States = MutableMapping[Tensor, dict[str, Any]]


class HostStates:
    """The states of one optimizer. `fetch` before a weight moves, `put` afterwards."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda: bool = device.type == "cuda"
        self._device = device
        self._host: dict[Tensor, dict[str, Tensor]] = {}
        self._order: list[Tensor] = []
        self._places: dict[Tensor, int] = {}
        self._coming: dict[Tensor, tuple[dict[str, Tensor], Any]] = {}
        self._gone: dict[Tensor, Any] = {}
        self._leaving: deque[Any] = deque()
        self._in, self._out = (torch.cuda.Stream(device) if self._on_cuda else None for _ in range(2))

    def fetch(self, weight: Tensor, states: States) -> None:
        """Its states on the device; those of the weight that moves next set out."""
        if weight not in self._host:
            return
        if weight not in self._coming:
            self._send(weight)
        tensors, arrived = self._coming.pop(weight)
        if arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)
        states[weight].update(tensors)
        place = self._places.get(weight)
        if place is not None and place + 1 < len(self._order):
            following = self._order[place + 1]
            if following not in self._coming and following in self._host:
                self._send(following)

    def put(self, weight: Tensor, states: States) -> None:
        """Its states to host memory, where `states` then has them."""
        if weight not in self._places:
            self._places[weight] = len(self._order)
            self._order.append(weight)
        state = states[weight]
        large = {name: value for name, value in state.items() if _is_moved(value)}
        if not large:
            return
        kept = self._host.setdefault(weight, {})
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self._device))
        for name, value in large.items():
            if name not in kept:
                kept[name] = self._host_tensor(value)
            with torch.cuda.stream(self._out):
                kept[name].copy_(value, non_blocking=True)
            if self._out is not None:
                value.record_stream(self._out)
            state[name] = kept[name]
        if self._out is not None:
            event = self._out.record_event()
            self._gone[weight] = event
            self._leaving.append(event)
            if len(self._leaving) > NUM_UNDER_WAY - 2:
                self._leaving.popleft().synchronize()

    def adopt(self, weight: Tensor, states: States) -> None:
        """States that a checkpoint gave, in any memory; small ones go to the device."""
        kept = self._host[weight] = {}
        for name, value in states[weight].items():
            if _is_moved(value):
                kept[name] = self._host_tensor(value).copy_(value)
                states[weight][name] = kept[name]
            elif isinstance(value, Tensor) and value.ndim:
                states[weight][name] = value.to(self._device)

    def wait(self) -> None:
        """Until everything that left has arrived."""
        if self._out is not None:
            self._out.synchronize()

    def _send(self, weight: Tensor) -> None:
        kept = self._host[weight]
        if self._in is None:
            self._coming[weight] = ({name: value.clone() for name, value in kept.items()}, None)
            return
        tensors = {name: torch.empty_like(value, device=self._device) for name, value in kept.items()}
        self._in.wait_stream(torch.cuda.current_stream(self._device))  # what used this memory before has ended
        if weight in self._gone:
            self._in.wait_event(self._gone[weight])
        with torch.cuda.stream(self._in):
            for name, tensor in tensors.items():
                tensor.copy_(kept[name], non_blocking=True)
                tensor.record_stream(self._in)
        self._coming[weight] = (tensors, self._in.record_event())

    def _host_tensor(self, like: Tensor) -> Tensor:
        """As large as it must be: PyTorch's own pinned memory comes in powers of two."""
        host = torch.empty_like(like, device="cpu", memory_format=torch.contiguous_format)
        if self._on_cuda:
            address = host.data_ptr()
            runtime: Any = torch.cuda.cudart()
            if int(runtime.cudaHostRegister(address, host.nbytes, 0)) == 0:  # else copies are slower, and still right
                weakref.finalize(host.untyped_storage(), runtime.cudaHostUnregister, address)
        return host


def _is_moved(value: Any) -> bool:
    return isinstance(value, Tensor) and type(value) is Tensor and value.numel() >= FEWEST_NUMBERS
