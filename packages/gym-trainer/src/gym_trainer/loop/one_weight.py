"""An optimizer that moves one weight at a time, so that the others' gradients or states need not be there.

Inside the backward pass (`stepping_in_backward`) a weight moves as soon as its gradient is whole, and the gradient is
given back before the next one is made. With `HostStates` the weight's states come from host memory for its update. Both
are exact where the update of one weight reads nothing of the others (`gym_sdk.spec.performance` says where).

It works through any optimizer that passes over weights without a gradient, which all of them do: the one that is to
move is the only one that has any.

Source: torch's tutorial "How to save memory by fusing the optimizer step into the backward pass".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gym_trainer.loop.host_states import HostStates


class OneWeightOptimizer(torch.optim.Optimizer):
    """`inner`, stepped weight by weight; what it keeps is `inner`'s own."""

    param_groups: list[dict[str, Any]]
    state: defaultdict[torch.Tensor, Any]

    def __init__(self, inner: torch.optim.Optimizer, states: HostStates | None = None) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], dict(inner.defaults))
        self.inner = inner
        self.states = states
        self._share()

    def _share(self) -> None:
        """A schedule sets the rates in `param_groups`, and a checkpoint reads `state`: they are `inner`'s."""
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def weights(self) -> Iterator[nn.Parameter]:
        """All that it moves."""
        return chain.from_iterable(group["params"] for group in self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        """Move every weight that has a gradient. Those that moved in the backward pass have none."""
        loss = closure() if closure is not None else None
        waiting = [(weight, weight.grad) for weight in self.weights() if weight.grad is not None]
        for weight, _ in waiting:
            weight.grad = None
        for weight, gradient in waiting:
            weight.grad = gradient
            self.step_weight(weight)
        return loss

    @torch.no_grad()
    def step_weight(self, weight: Tensor) -> None:
        """Move one weight, the only one with a gradient, and give the gradient back."""
        if self.states is not None:
            self.states.fetch(weight, self.inner.state)
        self.inner.step()
        weight.grad = None
        if self.states is not None:
            self.states.put(weight, self.inner.state)

    def state_dict(self) -> dict[str, Any]:
        """`inner`'s, wherever its tensors are."""
        if self.states is not None:
            self.states.wait()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave. States in host memory stay there: all of them at once may not fit on the device."""
        if self.states is None:
            self.inner.load_state_dict(state_dict)
        else:
            self.inner.load_state_dict(state_dict | {"state": {}})
            count_on_device = any(group.get("fused") or group.get("capturable") for group in self.param_groups)
            for number, weight in enumerate(self.weights()):
                if number in state_dict["state"]:
                    state = self.inner.state[weight] = _flat(state_dict["state"][number])
                    if count_on_device and isinstance(state.get("step"), Tensor):
                        state["step"] = state["step"].to(weight.device)
                    self.states.adopt(weight, self.inner.state)
            if hasattr(self.inner, "check_overrides"):  # of bitsandbytes, whose first step moves states to the device
                self.inner.check_overrides()  # pyright: ignore
                self.inner.initialized = True  # pyright: ignore
        self._share()


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    """bitsandbytes nests its tensors a level deeper in a checkpoint."""
    flat: dict[str, Any] = {}
    for name, value in state.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


class GradientNorm:
    """The norm of all gradients of a step, from one gradient after another, without waiting for the device."""

    def __init__(self) -> None:
        self._squares: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        square = torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
        self._squares = square if self._squares is None else self._squares + square

    def take(self) -> float:
        """Of what was added since the last call."""
        norm = 0.0 if self._squares is None else float(self._squares.sqrt())
        self._squares = None
        return norm


@contextmanager
def stepping_in_backward(optimizer: OneWeightOptimizer, norm: GradientNorm) -> Iterator[None]:
    """Every weight moves when its gradient is whole: the last use of the weight in a backward pass lies behind it."""

    def moved(weight: Tensor, on: OneWeightOptimizer) -> None:
        assert weight.grad is not None
        norm.add(weight.grad)
        on.step_weight(weight)

    handles = [
        weight.register_post_accumulate_grad_hook(partial(moved, on=optimizer))
        for weight in optimizer.weights()
        if weight.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
