"""Each part of the fast path: on, off with the reason, or not applicable. Nothing is half on without a word."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gym_sdk.spec.adapter import LoraAdapter
from gym_trainer.fast import attention
from gym_trainer.planning.decision import Part

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from gym_sdk.spec import RunSpec
    from gym_trainer.planning.hardware import DtypeName, Hardware


def parts_of(
    spec: RunSpec,
    config: PreTrainedConfig,
    hardware: Hardware,
    dtype: DtypeName,
    *,
    packed: bool,
    shares: bool,
    recompute: int,
    compiled: bool,
    unfused: str | None,
    offloaded_bytes: int,
    optimizer: tuple[Part, ...] = (),
) -> tuple[Part, ...]:
    """The parts of a plan, in the order of a step."""
    return (
        _packing(spec, config, packed),
        _shared_prompts(spec, packed, shares),
        _varlen(config, hardware, dtype, packed),
        Part(
            name="chunked loss",
            state="on",
            why="logits are made a chunk at a time, for trained tokens only (checked on the loaded model)",
        ),
        _lean_lora(spec),
        _fused(spec, unfused),
        _compile(spec, hardware, config, dtype, compiled, unfused),
        _recompute(recompute, config.get_text_config().num_hidden_layers),
        _offload(hardware, offloaded_bytes, unfused),
        *optimizer,
    )


def _packing(spec: RunSpec, config: PreTrainedConfig, packed: bool) -> Part:
    if packed:
        return Part(name="packing", state="on", why="rows side by side without padding, isolated by attention")
    if not spec.data.packing:
        return Part(name="packing", state="off", why="data.packing is false")
    return Part(name="packing", state="off", why=attention.why_not_isolated(config) or "unknown")


def _shared_prompts(spec: RunSpec, packed: bool, shares: bool) -> Part:
    name = "shared prompts"
    if getattr(spec.method, "data_objective", "sft") != "preference":
        return Part(name=name, state="not applicable", why="rows are no pairs")
    if shares:
        return Part(name=name, state="on", why="what a pair's two answers begin with alike is computed once")
    if not packed:
        return Part(name=name, state="off", why="rows are not packed")
    why = "little of the rows stands in them twice, layers are compiled, or flash-attn serves attention"
    return Part(name=name, state="off", why=why)


def _varlen(config: PreTrainedConfig, hardware: Hardware, dtype: DtypeName, packed: bool) -> Part:
    name = "variable-length attention kernel"
    if not packed:
        return Part(name=name, state="not applicable", why="rows are not packed")
    if hardware.kind == "cpu":
        return Part(name=name, state="not applicable", why="one attention call a document serves a processor best")
    if hardware.capability is not None and hardware.capability < (8, 0):
        return Part(name=name, state="off", why="flash kernels need compute capability 8.0 or newer")
    if reason := attention.why_not_varlen(config, "cuda", getattr(torch, dtype), capability=hardware.capability):
        return Part(name=name, state="off", why=reason)
    return Part(name=name, state="on", why="one kernel for all documents")


def _lean_lora(spec: RunSpec) -> Part:
    name = "lean LoRA products"
    adapter = spec.adapter
    if not isinstance(adapter, LoraAdapter):
        return Part(name=name, state="not applicable", why="no LoRA adapter")
    for reason in ("dropout", "dora"):
        if getattr(adapter, reason):
            return Part(name=name, state="off", why=f"adapter.{reason} is on")
    if spec.model.quantization != "none":
        return Part(name=name, state="off", why=f"the base is held in {spec.model.quantization}")
    return Part(name=name, state="on", why="A and B are multiplied in the model's own precision")


def why_not_fused(spec: RunSpec, hardware: Hardware, model: nn.Module) -> str | None:
    """Why layers keep their own forward, or None when they can be fused. `model`: trained parts on, without bytes."""
    if spec.performance.fused == "off":
        return "performance.fused is off"
    if spec.performance.compile == "on":
        return "performance.compile is on"
    if hardware.kind == "cpu":
        return "its kernels are for CUDA"
    if hardware.capability is not None and hardware.capability < (7, 5):
        return "Triton's matrix products need compute capability 7.5 or newer"
    if spec.model.quantization != "none":
        return f"the base is held in {spec.model.quantization}"
    from gym_trainer.fast.fused.apply import why_not_fused as why_not

    return why_not(model)


def _fused(spec: RunSpec, unfused: str | None) -> Part:
    name = "fused layers"
    if unfused is None:
        why = "LoRA's products inside the large ones, written-out backward passes (checked on the loaded model)"
        return Part(name=name, state="on", why=why)
    state = "off" if isinstance(spec.adapter, LoraAdapter) else "not applicable"
    return Part(name=name, state=state, why=unfused)


def why_not_compiled(
    spec: RunSpec, hardware: Hardware, config: PreTrainedConfig, dtype: DtypeName, *, packed: bool
) -> str | None:
    """Why layers are not compiled, or None when they can be."""
    if spec.performance.compile == "off":
        return "performance.compile is off"
    if hardware.kind == "cpu":
        return None if spec.performance.compile == "on" else "on a processor it repays itself only in long runs"
    if hardware.capability is not None and hardware.capability < (7, 0):
        return "Triton needs compute capability 7.0 or newer"
    if spec.model.quantization != "none":
        return f"the base is held in {spec.model.quantization}"
    if not packed:
        return "rows are not packed"
    if reason := attention.why_not_varlen(config, "cuda", getattr(torch, dtype), capability=hardware.capability):
        return f"one attention call a document cannot be compiled ({reason})"
    return None


def _compile(
    spec: RunSpec,
    hardware: Hardware,
    config: PreTrainedConfig,
    dtype: DtypeName,
    compiled: bool,
    unfused: str | None,
) -> Part:
    name = "compiled layers"
    if unfused is None:
        return Part(name=name, state="not applicable", why="the layers are fused")
    if compiled:
        return Part(name=name, state="on", why="each decoder layer by itself; kept on disk for the next run")
    reason = why_not_compiled(spec, hardware, config, dtype, packed=spec.data.packing)
    return Part(name=name, state="off", why=reason or "the run is too short to repay it")


def _recompute(recompute: int, num_layers: int) -> Part:
    if recompute == 0:
        return Part(name="recomputation", state="off", why="every layer's activations fit into memory")
    return Part(name="recomputation", state="on", why=f"{recompute} of {num_layers} layers are computed twice")


def _offload(hardware: Hardware, num_bytes: int, unfused: str | None) -> Part:
    name = "offload"
    if hardware.kind == "cpu":
        return Part(name=name, state="not applicable", why="there is one memory")
    if unfused is not None:
        return Part(name=name, state="off", why="of fused layers only")
    if not num_bytes:
        return Part(name=name, state="off", why="the inputs of recomputed layers fit into memory")
    return Part(name=name, state="on", why=f"{num_bytes / 2**30:.1f} GiB of layer inputs wait in host memory")
