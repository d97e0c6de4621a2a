"""One optimizer step: whole rows into micro-batches, summed losses, one division, and out-of-memory survived.

An out-of-memory throws the step's gradients away and computes the step again in micro-batches of half the size, with
the same random numbers. The rows of the step, and so its loss and gradient, stay what they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gym_data.packing import micro_batches
from gym_sdk.errors import RunFailed
from gym_trainer.loop.batch import Layout, MicroBatch, Row, StepBatch, make_micro_batch
from gym_trainer.loop.forward import ForwardModel
from gym_trainer.objectives.base import Objective, Ratio

_ROWS_AT_ONCE = 256
"""Rows laid out together by `for_each`: enough to pack well."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step measured, over all ranks."""

    loss: float
    normaliser: float
    """What the summed loss was divided by."""
    metrics: dict[str, tuple[float, float]]
    """Numerator and denominator by name."""
    num_tokens: int
    """Tokens that went through the model, padding left out."""
    num_trained_tokens: int
    num_micro_batches: int
    """Of this rank."""


class StepRunner:
    """Computes the loss and the gradients of whole steps."""

    def __init__(
        self,
        objective: Objective,
        *,
        micro_batch_tokens: int,
        layout: Layout,
        device: torch.device,
        whole_steps: bool = False,
        on_out_of_memory: Callable[[int, int], None] = lambda before, after: None,
    ) -> None:
        """`on_out_of_memory` hears the old and the new micro-batch size in tokens.

        With `whole_steps` weights move in the backward pass: a step is one micro-batch whatever its size, and one that
        has begun to move them cannot be tried again.
        """
        self.whole_steps = whole_steps
        self.objective = objective
        self.micro_batch_tokens: int = micro_batch_tokens
        self.layout: Layout = layout
        self.device = device
        self.on_out_of_memory = on_out_of_memory

    def run(
        self,
        model: ForwardModel,
        step: StepBatch,
        *,
        backward: Callable[[Tensor], None] | None,
        no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> StepResult:
        """Add the step's gradients to the parameters; only measure when `backward` is None.

        Raises:
            RunFailed: a single row does not fit into memory.
        """
        if backward is not None:
            step = self.objective.prepared_step(model, step)
        while True:
            random_state = _random_state(self.device)
            at_once = self.whole_steps and backward is not None
            bins = self._bins(step.rows)
            if at_once:
                bins = [tuple(chain.from_iterable(bins))]
            try:
                return self._run(model, step, bins, backward, no_sync)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                if at_once:
                    raise RunFailed(
                        f"out of memory on a step of {step.num_tokens} tokens, whose weights move in its backward pass",
                        hint="lower train.batch_size or data.max_length, and go on from the last checkpoint",
                    ) from None
            # Outside the handler, whose traceback would keep the failed pass's tensors alive.
            self._halve(bins)
            _forget_gradients(model.wrapped)
            _restore_random_state(random_state, self.device)

    def for_each(self, rows: Iterable[Row], function: Callable[[MicroBatch], None]) -> None:
        """Call `function` with micro-batches of all rows, without gradients; out-of-memory halves them for good.

        A micro-batch that fails is given again in pieces, so `function` may see a row twice.
        """
        for group in _batched(rows, _ROWS_AT_ONCE):
            waiting = self._bins(group)
            while waiting:
                current = waiting.pop(0)
                try:
                    with torch.no_grad():
                        function(make_micro_batch(current, layout=self.layout, device=self.device))
                    continue
                except (torch.OutOfMemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                self._halve([current])
                waiting = [*self._bins(current), *waiting]

    def _bins(self, rows: Sequence[Row]) -> list[tuple[Row, ...]]:
        """The micro-batches' rows. A padded micro-batch costs its longest row times its rows, so rows go by length."""
        if self.layout != "padded":
            lengths = [row.num_positions(self.layout) for row in rows]
            places = range(len(rows))
            return [tuple(rows[i] for i in bin) for bin in micro_batches(places, lengths, self.micro_batch_tokens)]
        bins: list[tuple[Row, ...]] = []
        current: list[Row] = []
        for row in sorted(rows, key=lambda row: -row.num_tokens):
            longest = max(len(document.ids) for document in (current or [row])[0].documents)
            num_documents = sum(len(other.documents) for other in current) + len(row.documents)
            if current and longest * num_documents > self.micro_batch_tokens:
                bins.append(tuple(current))
                current = []
            current.append(row)
        return [*bins, tuple(current)] if current else bins

    def _run(
        self,
        model: ForwardModel,
        step: StepBatch,
        bins: list[tuple[Row, ...]],
        backward: Callable[[Tensor], None] | None,
        no_sync: Callable[[], AbstractContextManager[Any]],
    ) -> StepResult:
        def batches(bins: Sequence[Sequence[Row]]) -> Iterator[MicroBatch]:
            for rows in bins:
                yield make_micro_batch(rows, layout=self.layout, device=self.device)

        counts = [self.objective.normaliser(step), float(step.num_tokens), float(step.num_trained_tokens)]
        normaliser, num_tokens, num_trained_tokens = _sum_over_ranks(counts, self.device)
        if normaliser <= 0:
            raise RunFailed(f"step {step.number + 1} of epoch {step.epoch + 1} has no trained {self.objective.unit}")
        with torch.no_grad():
            others = self.objective.statistics_rows(step)
            seen = batches(bins if others is step.rows else self._bins(others))
            statistics = _divide(_reduce(self.objective.statistics(model, seen), self.device))

        loss_total = torch.zeros((), dtype=torch.float64, device=self.device)
        sums: dict[str, Ratio] = {}
        for batch in batches(bins):
            with torch.set_grad_enabled(backward is not None), no_sync():
                result = self.objective.loss(model, batch, statistics)
                # Where weights move in the backward pass, a loss that ends the run must not move them first.
                if backward is not None and (not self.whole_steps or bool(result.loss.isfinite())):
                    backward(result.loss / normaliser)
            loss_total += result.loss.detach().double()
            for name, ratio in result.metrics.items():
                before = sums.get(name)
                total, count = ratio.total.detach().double(), ratio.count.detach().double()
                sums[name] = Ratio(before.total + total, before.count + count) if before else Ratio(total, count)
        if backward is not None:
            _sum_gradients_over_ranks(model.wrapped)
        (loss,) = _sum_over_ranks([float(loss_total)], self.device)
        return StepResult(
            loss=loss / normaliser,
            normaliser=normaliser,
            metrics=_reduce(sums, self.device),
            num_tokens=int(num_tokens),
            num_trained_tokens=int(num_trained_tokens),
            num_micro_batches=len(bins),
        )

    def _halve(self, bins: list[tuple[Row, ...]]) -> None:
        largest = max(sum(row.num_positions(self.layout) for row in rows) for rows in bins)
        if all(len(rows) == 1 for rows in bins):
            longest = max(row.num_tokens for rows in bins for row in rows)
            raise RunFailed(
                f"out of memory on a single row of {longest} tokens",
                hint="lower data.max_length, recompute more layers (performance.recompute_layers), "
                "or quantise the base (model.quantization=nf4)",
            )
        before = self.micro_batch_tokens
        self.micro_batch_tokens = max(1, min(before, largest) // 2)
        self.on_out_of_memory(before, self.micro_batch_tokens)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: CUDA has a class for it, the processor's allocator only a text."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return "DefaultCPUAllocator" in text or "CUDA out of memory" in text


def _batched(rows: Iterable[Row], size: int) -> Iterator[tuple[Row, ...]]:
    iterator = iter(rows)
    while batch := tuple(islice(iterator, size)):
        yield batch


def _forget_gradients(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _random_state(device: torch.device) -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _restore_random_state(state: tuple[Any, ...], device: torch.device) -> None:
    python, numpy, cpu, cuda = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    if not _is_distributed():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def _reduce(ratios: dict[str, Ratio], device: torch.device) -> dict[str, tuple[float, float]]:
    names = sorted(ratios)
    flat = [float(value) for name in names for value in (ratios[name].total, ratios[name].count)]
    summed = _sum_over_ranks(flat, device) if names else []
    return {name: (summed[2 * i], summed[2 * i + 1]) for i, name in enumerate(names)}


def _divide(ratios: dict[str, tuple[float, float]]) -> dict[str, float]:
    return {name: total / count if count else 0.0 for name, (total, count) in ratios.items()}


def _sum_gradients_over_ranks(model: nn.Module) -> None:
    """After the last micro-batch, so that a rank that ran out of memory can start its step again alone.

    Every rank sums the same parameters in the same order; one that had no rows adds zeros.
    """
    if not _is_distributed():
        return
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
