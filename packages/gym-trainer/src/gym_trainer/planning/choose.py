"""From a specification, a configuration and a device to the fastest setting that fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gym_sdk.errors import DoesNotFit, UserError
from gym_sdk.spec import Dpo, Kto
from gym_sdk.spec.adapter import LoraAdapter
from gym_sdk.spec.preference import chosen_reference
from gym_trainer.adapters.beside import beside_bytes
from gym_trainer.fast import attention
from gym_trainer.fast.apply import FastPath
from gym_trainer.planning.decision import DataShape, Option, Plan, RunPlan, SpeedPlan
from gym_trainer.planning.estimate import Estimator, MicroBatchEstimate, Simulations, optimizer_work
from gym_trainer.planning.hardware import DEVICES, GIB, DtypeName, Hardware
from gym_trainer.planning.memory import MemoryPlan, StaticMemory, overhead, product_workspace
from gym_trainer.planning.optimizer_place import (
    OptimizerPlace,
    PlaceReasons,
    copies_time_s,
    gradients_in_backward,
    states_under_way,
    update_workspace,
)
from gym_trainer.planning.parts import parts_of, why_not_compiled, why_not_fused
from gym_trainer.planning.speed import Work

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from gym_sdk.spec import RunSpec

_MOST_MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 16_384}
"""Larger micro-batches are no faster: the matrix products are large enough, and a processor's caches are small."""
_TOKENS_TO_REPAY_COMPILATION = 1_000_000
"""Compilation takes 15 to 25 s; at 15,000 tokens/s instead of 11,000 that is repaid after a million tokens (8B, H200).
Smaller models run faster and save as large a share, so they repay it in about as many seconds."""
_LONGER_STEPS = 1.25
"""Ragged rows make some steps longer than the mean: with this room nearly all of them are one micro-batch."""
_SMALL_LOSS_CHUNK = 256
"""Rows of logits at once where the usual number does not fit."""
_WORTH_SHARING = 0.05
"""Of a pair's tokens: gathering the keys of shared prompts moves 4 KB a token and layer of 8B, which keeps 130."""
_SLOWER_HOST = 1.3
"""How much longer a host takes for the same launches from one process to the next: 91 to 120 ms and more were measured
(docs/performance.md)."""
_WORTH_MEMORY = 1.02
"""A setting must be this much faster to be chosen over one that takes less memory."""


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    micro_batch: MicroBatchEstimate
    recompute_layers: int
    offload: bool
    memory: MemoryPlan
    work: Work
    step_tokens: int
    place: OptimizerPlace
    update_time_s: float
    """Of the optimizer's part of a step."""

    @property
    def micro_batch_time_s(self) -> float:
        """Of one that is as full as a step lets it be."""
        return self.work.time_of_share_s(min(1.0, self.step_tokens / self.micro_batch.num_tokens))

    @property
    def time_per_token_s(self) -> float:
        """Of a whole step. A small rest of it costs the host as much as a full micro-batch."""
        num_full, rest = divmod(self.step_tokens, self.micro_batch.num_tokens)
        time_s = self.update_time_s + num_full * self.work.time_s
        if rest:
            time_s += self.work.time_of_share_s(rest / self.micro_batch.num_tokens)
        return time_s / self.step_tokens

    @property
    def expected_time_per_token_s(self) -> float:
        """The mean of a host as fast as planned and a slower one: where launches take about as long as the device's
        work, half of all hosts keep it waiting."""
        slower = dataclasses.replace(self.work, host_s=self.work.host_s * _SLOWER_HOST)
        return (self.time_per_token_s + dataclasses.replace(self, work=slower).time_per_token_s) / 2


ResidentBytes = Callable[[DtypeName], int]


def _nothing_beside(dtype: DtypeName) -> int:
    return 0


def plan(
    spec: RunSpec,
    config: PreTrainedConfig,
    hardware: Hardware,
    *,
    data: DataShape | None = None,
    price_per_hour: float | None = None,
    resident_bytes: ResidentBytes = _nothing_beside,
    compare: bool = True,
    suggest: bool = True,
) -> Plan:
    """Decide everything that is decided before weights load.

    Args:
        config: the model's configuration; no weights are read.
        data: the rows' lengths, where the data is prepared; `data.max_length` stands for them otherwise.
        price_per_hour: of the device, in any currency; `output.price_per_hour` when not given.
        resident_bytes: what the method holds on the device beside the model in a run of a dtype, such as a teacher.
        compare: also look for the smallest card that would do.
        suggest: say what would fit where this does not. That search must not search in turn.

    Raises:
        DoesNotFit: with what would fit.
        UserError: a setting that this device cannot serve.
    """
    hardware = _limited(spec, hardware)
    price_per_hour = spec.output.price_per_hour if price_per_hour is None else price_per_hour
    dtype = _dtype(spec, hardware)
    choice = _attention(spec, config, hardware, dtype)
    shares = choice in attention.SHARES_PREFIXES and _shares_prompts(spec, data)
    if data and not shares:
        data = dataclasses.replace(data, shared_tokens=0)
    longest = min(data.longest_row_tokens, _row_limit(spec)) if data else _row_limit(spec)
    document_tokens = max(1, (data.mean_row_tokens if data else _row_limit(spec)) // _documents_per_row(spec))
    lengths = (document_tokens, round(data.shared_tokens / data.num_rows) if data else 0)
    fast = FastPath()
    simulations = Simulations.of(spec, config, getattr(torch, dtype), fast, *lengths)
    unfused = why_not_fused(spec, hardware, simulations.models[0])
    if unfused is None:
        fast = FastPath(fused=True)
        simulations = Simulations.of(spec, config, getattr(torch, dtype), fast, *lengths)
    compiled = unfused is not None and not why_not_compiled(spec, hardware, config, dtype, packed=choice is not None)
    compiled = compiled and not _too_short(spec, hardware, data)
    if compiled and shares:  # not measured: keys of changing numbers would compile layers again
        shares, data = False, dataclasses.replace(data, shared_tokens=0) if data else None
        lengths = (document_tokens, 0)
        simulations = Simulations.of(spec, config, getattr(torch, dtype), fast, *lengths)
    estimator = Estimator(
        spec=spec,
        hardware=hardware,
        simulations=simulations,
        compiled=compiled,
        resident_bytes=resident_bytes(dtype) + beside_bytes(spec.adapter),
    )
    reasons = PlaceReasons.of(spec, hardware, dtype, estimator.static(), packed=choice is not None)
    places = reasons.places(spec)
    static = estimator.static()
    held = static.frozen_weights + static.trained_weights + estimator.resident_bytes
    held += 0 if places[-1].offload else static.optimizer
    if not suggest and held > hardware.memory_bytes:  # a search tries many: micro-batches take long to simulate
        raise DoesNotFit(f"what the run keeps takes {_gib(held)} GiB, and {hardware.name} has less")
    candidates = list(_candidates(estimator, places, longest, data))
    fitting = [candidate for candidate in candidates if candidate.memory.fits]
    if not fitting and hardware.kind == "cuda":
        fast = dataclasses.replace(fast, loss_chunk_size=_SMALL_LOSS_CHUNK)
        simulations = Simulations.of(spec, config, getattr(torch, dtype), fast, *lengths)
        estimator = dataclasses.replace(estimator, simulations=simulations)
        candidates = list(_candidates(estimator, places, longest, data))
        fitting = [candidate for candidate in candidates if candidate.memory.fits]
    if not fitting:
        hint = _what_would_fit(spec, config, hardware, data, resident_bytes) if suggest else None
        raise _does_not_fit(hardware, candidates, hint)
    best = _best(fitting, places)
    num_weights, num_trained = estimator.num_weights()
    speed = _speed(estimator, best, dtype, data)
    return Plan(
        device=hardware.kind,
        hardware=hardware.name,
        num_threads=hardware.num_threads,
        dtype=dtype,
        num_weights=num_weights,
        num_trained=num_trained,
        attention=choice or "sdpa",
        packed=choice is not None,
        shared_prompts=shares,
        micro_batch_tokens=best.micro_batch.num_tokens,
        num_layers=estimator.num_layers,
        recompute_layers=best.recompute_layers,
        offload=best.offload,
        optimizer_in_backward=best.place.in_backward,
        offload_optimizer=best.place.offload,
        loss_chunk_size=estimator.simulations.fast.loss_chunk_size,
        fused=unfused is None,
        compile=estimator.compiled,
        memory=best.memory,
        speed=speed,
        run=_run(spec, speed, data, price_per_hour),
        parts=parts_of(
            spec,
            config,
            hardware,
            dtype,
            packed=choice is not None,
            shares=shares,
            recompute=best.recompute_layers,
            compiled=estimator.compiled,
            unfused=unfused,
            offloaded_bytes=best.offload * best.recompute_layers * estimator.input_bytes(best.micro_batch.num_tokens),
            optimizer=reasons.parts(best.place, best.memory.optimizer_in_host),
        ),
        smaller=_smaller(spec, config, hardware, data, resident_bytes) if compare and hardware.kind == "cuda" else None,
    )


def _too_short(spec: RunSpec, hardware: Hardware, data: DataShape | None) -> bool:
    """Whether compiling would take longer than it saves. Unless it was asked for."""
    if spec.performance.compile == "on" or data is None:
        return False
    num_tokens = spec.train.epochs * data.num_tokens
    if spec.train.max_steps is not None:
        num_tokens = spec.train.max_steps * _step_tokens(spec, data)
    return num_tokens < _TOKENS_TO_REPAY_COMPILATION


def _limited(spec: RunSpec, hardware: Hardware) -> Hardware:
    limit = spec.performance.memory_limit_gb
    return hardware if limit is None else hardware.limited_to(int(limit * 1e9))


def _dtype(spec: RunSpec, hardware: Hardware) -> DtypeName:
    if spec.model.dtype == "auto":
        return hardware.training_dtype
    if spec.model.dtype not in hardware.matmul_flops_per_s:
        raise UserError(
            f"{hardware.name} does not compute in {spec.model.dtype}",
            hint=f"set model.dtype=auto, which is {hardware.training_dtype} there",
        )
    return spec.model.dtype


def _attention(spec: RunSpec, config: PreTrainedConfig, hardware: Hardware, dtype: DtypeName) -> str | None:
    """The attention's name for packed rows, or None where rows go one by one."""
    if not spec.data.packing or attention.why_not_isolated(config):
        return None
    return attention.choose(
        config,
        hardware.kind,
        getattr(torch, dtype),
        spec.performance.attention,
        capability=hardware.capability,
    )


def _candidates(
    estimator: Estimator, places: list[OptimizerPlace], longest: int, data: DataShape | None
) -> Iterator[_Candidate]:
    step_tokens = _step_tokens(estimator.spec, data)
    static = estimator.static()
    update_s = optimizer_work(static, estimator.hardware, estimator.spec.train.optimizer).time_s
    for place in places:
        whole_step = max(step_tokens, _longest_step_tokens(estimator.spec, longest, data))
        sizes = [whole_step] if place.in_backward else _micro_batch_sizes(estimator, longest, data)
        for num_tokens in sizes:
            micro_batch, num_recomputed, offload = _recompute_choice(estimator, place, num_tokens, step_tokens)
            work = micro_batch.work(num_recomputed) + micro_batch.forward.times(_forward_passes(estimator.spec))
            copies_s = copies_time_s(place, estimator.spec.train.optimizer, static, estimator.hardware)
            yield _Candidate(
                micro_batch=micro_batch,
                recompute_layers=num_recomputed,
                offload=offload,
                memory=_memory(estimator, place, micro_batch, num_recomputed, step_tokens),
                work=work,
                step_tokens=step_tokens,
                place=place,
                update_time_s=update_s + copies_s,
            )


def _longest_step_tokens(spec: RunSpec, longest: int, data: DataShape | None) -> int:
    """Of any step of the run; as long as it could be at all where its rows are not known."""
    known = data.longest_step_tokens if data else None
    return longest * spec.batch_rows if known is None else known


def _micro_batch_sizes(estimator: Estimator, longest: int, data: DataShape | None) -> list[int]:
    """From the longest row, which is never split, in doublings up to a whole step."""
    spec = estimator.spec
    if spec.train.micro_batch_tokens is not None:
        return [max(spec.train.micro_batch_tokens, longest)]
    step_tokens = _step_tokens(spec, data)
    if data and data.longest_row_tokens > data.mean_row_tokens * _LONGER_STEPS:
        step_tokens = round(step_tokens * _LONGER_STEPS)
    most = max(longest, min(step_tokens, _MOST_MICRO_BATCH_TOKENS[estimator.hardware.kind]))
    sizes = [longest]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    if sizes[-1] < most:
        sizes.append(most)
    return sizes


def _recompute_choice(
    estimator: Estimator, place: OptimizerPlace, num_tokens: int, step_tokens: int
) -> tuple[MicroBatchEstimate, int, bool]:
    """The fewest recomputed layers that fit, else all of them with their inputs in host memory, where that is possible.

    Recomputation is simulated only where it is needed: a simulation costs about as much as the import of a library.
    """
    requested, num_layers = estimator.spec.performance.recompute_layers, estimator.num_layers
    if requested != "auto" and requested > num_layers:
        raise UserError(f"performance.recompute_layers is {requested}, but the model has {num_layers} layers")
    kept = estimator.micro_batch(num_tokens, recompute=False)
    if requested == 0 or (requested == "auto" and _memory(estimator, place, kept, 0, step_tokens).fits):
        return kept, 0, False
    micro_batch = estimator.micro_batch(num_tokens)
    if requested != "auto":
        return micro_batch, requested, False
    for num_recomputed in range(1, num_layers + 1):
        if _memory(estimator, place, micro_batch, num_recomputed, step_tokens).fits:
            return micro_batch, num_recomputed, False
    if estimator.simulations.fast.fused:
        return estimator.micro_batch(num_tokens, offload=True), num_layers, True
    return micro_batch, num_layers, False


def _memory(
    estimator: Estimator, place: OptimizerPlace, micro_batch: MicroBatchEstimate, num_recomputed: int, step_tokens: int
) -> MemoryPlan:
    """With several micro-batches a step, gradients are there from the first to the last; else they grow late. Where
    weights move within the backward pass, gradients are there for a moment, as the simulation has it."""
    static = estimator.static()
    model, optimizer = estimator.simulations.models[0], estimator.spec.train.optimizer
    if place.in_backward:
        early, late = gradients_in_backward(model, compiled=estimator.compiled), 0
    else:
        accumulates = micro_batch.num_tokens < step_tokens
        early, late = (static.gradients, 0) if accumulates else (0, static.gradients)
    states = static.optimizer
    if place.offload:
        moving = states_under_way(model, optimizer)
        states = moving.within if place.in_backward else 0
        late += moving.last - states
    reference = _reference_bytes(estimator.spec, static)
    beside = estimator.resident_bytes
    peak = micro_batch.memory.peak(estimator.num_layers, num_recomputed, late_bytes=late)
    peak += product_workspace(estimator.hardware)
    workspace = update_workspace(model, optimizer)
    peak = peak + workspace if place.in_backward else max(peak, late + workspace)
    activations = min(peak, micro_batch.memory.activations(estimator.num_layers, num_recomputed))
    weights = static.frozen_weights + static.trained_weights + reference
    return MemoryPlan(
        weights=weights,
        gradients=early,
        optimizer=states,
        activations=activations,
        workspace=peak - activations,
        method=beside,
        overhead=overhead(estimator.hardware, weights + early + states + peak + beside),
        limit=estimator.hardware.memory_bytes,
        optimizer_in_host=static.optimizer if place.offload else 0,
    )


def _step_tokens(spec: RunSpec, data: DataShape | None) -> int:
    """Positions of the model's row that a step takes."""
    return (data.mean_row_positions if data else _row_limit(spec)) * spec.batch_rows


def _shares_prompts(spec: RunSpec, data: DataShape | None) -> bool:
    """Whether enough of the rows' tokens stand in them twice. Where the data is not known, prompts are taken to be."""
    if _documents_per_row(spec) == 1:
        return False
    return data is None or data.shared_tokens >= _WORTH_SHARING * data.num_tokens


def _documents_per_row(spec: RunSpec) -> int:
    """A pair's two answers are two documents that are never split between micro-batches."""
    return 2 if getattr(spec.method, "data_objective", "sft") == "preference" else 1


def _row_limit(spec: RunSpec) -> int:
    """The most tokens of a row: `data.max_length` holds for each of its documents."""
    return _documents_per_row(spec) * spec.data.max_length


def _forward_passes(spec: RunSpec) -> int:
    """Passes of a step beside the one that learns: a reference's, and those of KTO's mismatched answers."""
    if not isinstance(spec.method, Dpo | Kto):
        return 0
    has_reference = chosen_reference(spec) != "precomputed"
    return has_reference + (1 + has_reference) * isinstance(spec.method, Kto)


def _reference_bytes(spec: RunSpec, static: StaticMemory) -> int:
    """What a preference method keeps to compare with: the trained weights as they were, where it copies them."""
    keeps = isinstance(spec.method, Dpo | Kto) and chosen_reference(spec) == "frozen_copy"
    return static.trained_weights if keeps else 0


def _best(fitting: list[_Candidate], places: list[OptimizerPlace]) -> _Candidate:
    """The fastest; among those as fast, the one whose optimizer works most plainly, then the smallest."""
    fastest = min(candidate.expected_time_per_token_s for candidate in fitting)
    good = [c for c in fitting if c.expected_time_per_token_s <= fastest * _WORTH_MEMORY]
    return min(good, key=lambda candidate: (places.index(candidate.place), candidate.memory.total))


def _speed(estimator: Estimator, best: _Candidate, dtype: DtypeName, data: DataShape | None) -> SpeedPlan:
    hardware = estimator.hardware
    time_per_token_s = best.time_per_token_s
    positions_per_token = data.mean_row_positions / data.mean_row_tokens if data else 1.0
    flops_per_token = estimator.flops_per_token(best.micro_batch) * positions_per_token
    throughput = 1 / (time_per_token_s * positions_per_token)
    peak = hardware.peak_flops_per_s.get(dtype, hardware.matmul_flops_per_s[dtype])
    return SpeedPlan(
        flops_per_token=flops_per_token,
        peak_flops_per_s=peak,
        micro_batch_time_s=best.micro_batch_time_s,
        optimizer_time_s=best.update_time_s,
        throughput_tokens_per_s=throughput,
        model_flops_utilisation=flops_per_token * throughput / peak,
    )


def _run(spec: RunSpec, speed: SpeedPlan, data: DataShape | None, price_per_hour: float | None) -> RunPlan | None:
    if data is None:
        return None
    per_epoch = math.ceil(data.num_rows / spec.batch_rows)
    num_steps = spec.train.max_steps or math.ceil(spec.train.epochs * per_epoch)
    num_tokens = round(num_steps / per_epoch * data.num_tokens)
    time_s = num_tokens / speed.throughput_tokens_per_s
    cost = None if price_per_hour is None else price_per_hour * time_s / 3600
    return RunPlan(num_steps=num_steps, num_tokens=num_tokens, time_s=time_s, cost=cost)


def _smaller(
    spec: RunSpec, config: PreTrainedConfig, hardware: Hardware, data: DataShape | None, resident_bytes: ResidentBytes
) -> Option | None:
    """The card with the least memory that would do, if it has less than this one."""
    for card in sorted(DEVICES.values(), key=lambda card: card.memory_bytes):
        if card.memory_bytes >= hardware.memory_bytes:
            return None
        try:
            other = plan(spec, config, card, data=data, resident_bytes=resident_bytes, compare=False, suggest=False)
        except UserError:
            continue
        return Option(
            device=card.name,
            throughput_tokens_per_s=other.speed.throughput_tokens_per_s,
            memory_bytes=other.memory.total,
        )
    return None


def _does_not_fit(hardware: Hardware, candidates: list[_Candidate], hint: str | None) -> DoesNotFit:
    least = min(candidates, key=lambda candidate: candidate.memory.total).memory
    teacher = f", teacher {_gib(least.method)}" if least.method else ""
    return DoesNotFit(
        f"the run needs {_gib(least.total)} GiB and {hardware.name} has {_gib(least.limit)} GiB "
        f"(weights {_gib(least.weights)}, gradients {_gib(least.gradients)}, optimizer {_gib(least.optimizer)}, "
        f"activations and workspace {_gib(least.activations + least.workspace)}{teacher}, "
        f"overhead {_gib(least.overhead)})",
        hint=hint or "use a smaller model",
    )


def _what_would_fit(
    spec: RunSpec, config: PreTrainedConfig, hardware: Hardware, data: DataShape | None, resident_bytes: ResidentBytes
) -> str | None:
    """Changes to the specification that fit on this device, tried one after another, then a larger card."""
    changes: list[tuple[str, RunSpec]] = []
    if spec.performance.recompute_layers != "auto":
        changes.append(("performance.recompute_layers=auto", _with(spec, "performance", recompute_layers="auto")))
    if spec.train.micro_batch_tokens is not None:
        changes.append(("no train.micro_batch_tokens", _with(spec, "train", micro_batch_tokens=None)))
    base = spec
    if spec.adapter.kind in ("full", "freeze") and spec.train.max_grad_norm is not None:
        unclipped = _with(spec, "train", max_grad_norm=None)
        changes.append(("train.max_grad_norm=null (weights then move within the backward pass)", unclipped))
        name = "train.max_grad_norm=null with train.optimizer=adamw_8bit"
        changes.append((name, _with(unclipped, "train", optimizer="adamw_8bit")))
    if not isinstance(spec.adapter, LoraAdapter):
        base = spec.model_copy(update={"adapter": LoraAdapter()})
        changes.append(("adapter.kind=lora", base))
    if hardware.kind == "cuda" and spec.model.quantization == "none":
        name = "adapter.kind=lora with model.quantization=nf4" if base is not spec else "model.quantization=nf4"
        changes.append((name, _with(base, "model", quantization="nf4")))
    length = spec.data.max_length // 2
    while length >= 256:
        changes.append((f"data.max_length={length}", _with(spec, "data", max_length=length)))
        length //= 2
    for name, changed in changes:
        try:
            plan(changed, config, hardware, data=data, resident_bytes=resident_bytes, compare=False, suggest=False)
        except UserError:
            continue
        return f"{name} would fit"
    for card in sorted(DEVICES.values(), key=lambda card: card.memory_bytes):
        try:
            unlimited = _with(spec, "performance", memory_limit_gb=None)
            plan(unlimited, config, card, data=data, resident_bytes=resident_bytes, compare=False, suggest=False)
        except UserError:
            continue
        return f"it would fit on a card of {_gib(card.memory_bytes)} GiB ({card.name})"
    return None


def _with(spec: RunSpec, section: str, **changes: object) -> RunSpec:
    return spec.model_copy(update={section: getattr(spec, section).model_copy(update=changes)})


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"
