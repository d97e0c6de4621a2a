"""`performance:` and `parallel:` what the plan may choose, and what it must not."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gym_sdk.spec._base import SpecModel


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

    num_threads: Annotated[int, Field(ge=1)] | None = None
    """Processor threads for the arithmetic; all cores when not given."""


class ParallelSpec(SpecModel):
    """How the work is spread."""

    strategy: Literal["auto", "single"] = "auto"
    """One device."""
