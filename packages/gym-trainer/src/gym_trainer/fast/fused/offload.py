"""Layer inputs in host memory between the forward and the backward pass, copied while the device computes.

A recomputed layer keeps its input only; of a deep model on a small card these are most of what is left. The copies run
on a stream of their own, out behind the layer that reads the input, back in one layer ahead of the backward pass.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(eq=False)
class Stored:
    """One input outside the device; the store hands it back."""

    shape: torch.Size
    dtype: torch.dtype
    host: torch.Tensor | None
    device: torch.Tensor | None = None
    arrived: Any = None


class HostStore:
    """Inputs of one model's layers. The backward pass takes them in the opposite order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: list[torch.Tensor] = []
        self._stack: list[weakref.ref[Stored]] = []

    def put(self, x: torch.Tensor) -> Stored:
        """Copy out; the caller lets go of `x`."""
        host = None
        if self._stream is not None:
            host = self._buffer(x)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                host[: x.numel()].copy_(x.view(-1), non_blocking=True)
            x.record_stream(self._stream)
        elif not x.is_meta:
            host = x.clone()
        stored = Stored(x.shape, x.dtype, host)
        self._stack.append(weakref.ref(stored))
        return stored

    def take(self, stored: Stored) -> torch.Tensor:
        """The input on the device again; the one before it sets out."""
        self._fetch(stored)
        x = stored.device
        assert x is not None
        if stored.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(stored.arrived)
        stored.device = None
        while self._stack:
            top = self._stack[-1]()
            if top is not None and top is not stored:
                break
            self._stack.pop()
        before = self._stack[-1]() if self._stack else None
        if before is not None:
            self._fetch(before)
        return x

    def _fetch(self, stored: Stored) -> None:
        if stored.device is not None:
            return
        if self._stream is None and stored.host is not None:
            stored.device = stored.host
            return
        x = torch.empty(stored.shape, dtype=stored.dtype, device=self._device)
        if self._stream is None or stored.host is None:  # a plan's simulation: there is nothing to copy
            stored.device = x
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # what used this memory before has ended
        with torch.cuda.stream(self._stream):
            x.view(-1).copy_(stored.host[: x.numel()], non_blocking=True)
            stored.arrived = self._stream.record_event()
        x.record_stream(self._stream)
        # the stream runs in order: what is copied into this buffer next waits for this copy
        self._free.append(stored.host)
        stored.device, stored.host = x, None

    def _buffer(self, x: torch.Tensor) -> torch.Tensor:
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= x.numel() and buffer.dtype == x.dtype:
                return self._free.pop(index)
        return torch.empty(x.numel(), dtype=x.dtype, pin_memory=True)
