"""`performance:` and `parallel:` what the plan may choose, and what it must not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from gym_sdk.spec._base import SpecModel

if TYPE_CHECKING:
    from gym_sdk.spec.run import RunSpec


class PerformanceSpec(SpecModel):
    """Automatic unless given."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train: a CUDA device when there is one."""

    memory_limit_gb: Annotated[float, Field(gt=0)] | None = None
    """Plan for this much memory (GB of 10^9 bytes) instead of all that the device has free; on a CUDA device PyTorch is
    held to it."""

    attention: Literal["auto", "varlen", "sdpa"] = "auto"
    """How packed rows are kept apart: `varlen` needs a CUDA device; `sdpa` works everywhere."""

    compile: Literal["auto", "on", "off"] = "auto"
    """Compile each decoder layer. `auto` compiles on CUDA when the run is long enough to repay it."""

    fused: Literal["auto", "off"] = "auto"
    """Decoder layers written out forward and backward, with LoRA's products inside the large ones: on CUDA, for LoRA on
    a base that is not quantised. Where they are fused they need no compiling."""

    recompute_layers: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """How many decoder layers are computed again in the backward pass instead of being kept; the fewest that
    fit when auto."""

    optimizer_in_backward: Literal["auto", "on", "off"] = "auto"
    """Full training without room for gradients: each weight moves within the backward pass, when its gradient is whole.
    Exact where a step is one micro-batch and `train.max_grad_norm` is null; `auto` takes it there when it is needed."""

    offload_optimizer: Literal["auto", "on", "off"] = "auto"
    """Full training with the optimizer's states in host memory, on the device only while their weight moves. `auto`
    takes it when it is needed."""

    num_threads: Annotated[int, Field(ge=1)] | None = None
    """Processor threads for the arithmetic; all cores when not given."""


class ParallelSpec(SpecModel):
    """How the work is spread."""

    strategy: Literal["auto", "single"] = "auto"
    """One device."""


def why_not_in_backward(spec: RunSpec) -> str | None:
    """Why moving weights within the backward pass would change a run, or bring nothing; None where it is exact."""
    train = spec.train
    if spec.adapter.kind not in ("full", "freeze"):
        return f"the trained weights of adapter kind {spec.adapter.kind} are few: there is nothing to save"
    if train.max_grad_norm is not None:
        return "clipping needs every gradient before the first weight moves; set train.max_grad_norm to null"
    if train.micro_batch_tokens is not None:
        return "gradients of several micro-batches add up before weights move; leave train.micro_batch_tokens out"
    if train.optimizer.startswith("schedule_free"):
        return f"{train.optimizer} counts steps of all weights at once"
    return None


_NOT_OFFLOADED = {
    "sgd": "has no states",
    "muon": "is two optimizers in one",
    "schedule_free_adamw": "counts steps of all weights at once",
    "schedule_free_sgd": "counts steps of all weights at once",
    "paged_adamw_32bit": "pages its states by itself",
    "paged_adamw_8bit": "pages its states by itself",
    "adamw_torch_8bit": "keeps its states as tensors of a class of its own",
    "adamw_torch_4bit": "keeps its states as tensors of a class of its own",
    "galore_adamw": "keeps its projections as objects",
    "apollo_adamw": "keeps its projections as objects",
}


def why_not_offloaded(spec: RunSpec) -> str | None:
    """Why the optimizer's states cannot wait in host memory, or bring nothing there; None where they can."""
    if spec.adapter.kind not in ("full", "freeze"):
        return f"the trained weights of adapter kind {spec.adapter.kind} are few: there is nothing to save"
    reason = _NOT_OFFLOADED.get(spec.train.optimizer)
    return reason and f"{spec.train.optimizer} {reason}"
