"""What a step measures beside its loss: speed, memory, and the method's own numbers."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from gym_trainer.loop.step import StepResult


class StepMeter:
    """Adds steps up from one log line to the next."""

    def __init__(
        self,
        *,
        flops_per_token: float | None = None,
        peak_flops_per_s: float | None = None,
        derived: Callable[[dict[str, float]], dict[str, float]] = lambda metrics: {},
        cost: Callable[[], float] | None = None,
    ) -> None:
        """Model-FLOP utilisation is given when both are known. `derived` makes metrics out of others; `cost` is what
        the run has cost so far."""
        self.cost = cost
        self.derived = derived
        self.flops_per_token = flops_per_token
        self.peak_flops_per_s = peak_flops_per_s
        self.compute_time_s: float = 0.0
        self.num_tokens: int = 0
        self.num_trained_tokens: int = 0
        self._reset()

    def _reset(self) -> None:
        self._num_tokens = 0
        self._num_trained_tokens = 0
        self._metrics: dict[str, tuple[float, float]] = {}
        self._since: float | None = None

    def start(self) -> None:
        """A step begins."""
        if self._since is None:
            self._since = time.perf_counter()

    def stop(self, result: StepResult) -> None:
        """A step's gradients are there."""
        self._num_tokens += result.num_tokens
        self._num_trained_tokens += result.num_trained_tokens
        for name, (total, count) in result.metrics.items():
            before = self._metrics.get(name, (0.0, 0.0))
            self._metrics[name] = (before[0] + total, before[1] + count)

    def take(self, state: Any) -> dict[str, float]:
        """The numbers since the last call, the optimizer's work included."""
        elapsed_s = time.perf_counter() - (self._since if self._since is not None else time.perf_counter())
        values = {name: total / count for name, (total, count) in self._metrics.items() if count}
        values |= self.derived(values)
        values["num_tokens"] = float(self._num_tokens)
        values["num_trained_tokens"] = float(self._num_trained_tokens)
        if elapsed_s > 0:
            rate = self._num_tokens / elapsed_s
            values["throughput_tokens_per_s"] = rate
            values["throughput_trained_tokens_per_s"] = self._num_trained_tokens / elapsed_s
            if self.flops_per_token and self.peak_flops_per_s:
                values["model_flops_utilisation"] = rate * self.flops_per_token / self.peak_flops_per_s
        if self.cost is not None:
            values["cost"] = self.cost()
        values["peak_memory_bytes"] = float(peak_memory_bytes())
        self.compute_time_s += elapsed_s
        self.num_tokens += self._num_tokens
        self.num_trained_tokens += self._num_trained_tokens
        self._reset()
        return values


def peak_memory_bytes() -> int:
    """The most memory in use so far: the device's where there is one, the process's otherwise."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
