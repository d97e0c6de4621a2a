"""A plan as text, readable without colour."""

from __future__ import annotations

from gym_trainer.planning.decision import Plan
from gym_trainer.planning.hardware import GIB


def render(plan: Plan) -> str:
    """A table of choices, memory, time and parts."""
    where = plan.hardware
    lines = [
        _row("device", f"{where}, {plan.dtype}"),
        _row("model", f"{_count(plan.num_weights)} weights, {_count(plan.num_trained)} trained"),
        _row("attention", plan.attention + ("" if plan.packed else ", one row at a time")),
        _row("micro-batch", f"{plan.micro_batch_tokens:,} tokens"),
        _row("layers", "fused" if plan.fused else "compiled" if plan.compile else "as they are"),
        _row("recomputed", f"{plan.recompute_layers} of {plan.num_layers} layers"),
        *_optimizer(plan),
        "",
        "memory                      GiB",
    ]
    memory = plan.memory
    for name in ("weights", "gradients", "optimizer", "activations", "workspace", "overhead"):
        lines.append(f"  {name:<20}{getattr(memory, name) / GIB:>9.2f}")
    if memory.method:
        lines.append(f"  {'teacher':<20}{memory.method / GIB:>9.2f}")
    if memory.optimizer_in_host:
        lines.append(f"  {'(in host memory)':<20}{memory.optimizer_in_host / GIB:>9.2f}")
    lines += [f"  {'at most':<20}{memory.total / GIB:>9.2f}   of {memory.limit / GIB:.2f}", "", "speed"]
    speed = plan.speed
    lines += [
        f"  {speed.throughput_tokens_per_s:,.0f} tokens/s, {speed.flops_per_token / 1e9:.2f} GFLOP a token, "
        f"{speed.model_flops_utilisation:.0%} of {_rate(speed.peak_flops_per_s)}",
        f"  {_time(speed.micro_batch_time_s)} a micro-batch, {_time(speed.optimizer_time_s)} an optimizer update",
    ]
    if plan.run is not None:
        cost = "" if plan.run.cost is None else f", cost {_cost(plan.run.cost)}"
        time = _time(plan.run.time_s)
        lines.append(f"  {plan.run.num_steps:,} steps, {plan.run.num_tokens:,} tokens: about {time} of training{cost}")
    lines += ["", "parts"]
    width = max(len(part.name) for part in plan.parts)
    lines += [f"  {part.name:<{width}}  {part.state:<14}  {part.why}" for part in plan.parts]
    if plan.smaller is not None:
        lines += [
            "",
            f"{plan.smaller.device} would do too: {plan.smaller.throughput_tokens_per_s:,.0f} tokens/s "
            f"in {plan.smaller.memory_bytes / GIB:.1f} GiB",
        ]
    return "\n".join(lines)


def _optimizer(plan: Plan) -> list[str]:
    words = ["in the backward pass"] * plan.optimizer_in_backward + ["states in host memory"] * plan.offload_optimizer
    return [_row("optimizer", ", ".join(words))] if words else []


def _row(name: str, value: str) -> str:
    return f"{name:<14}{value}"


def _count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return str(number)


def _cost(amount: float) -> str:
    return f"{amount:.2f}" if amount >= 0.1 or amount == 0 else f"{amount:.2g}"


def _rate(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:,.0f} TFLOP/s" if flops_per_s >= 1e13 else f"{flops_per_s / 1e9:,.0f} GFLOP/s"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
