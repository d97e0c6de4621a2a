"""Each part of the fast path: on, off with the reason, or not applicable. Nothing is half on without a word."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gym_trainer.fast import attention
from gym_trainer.planning.decision import Part

if TYPE_CHECKING:
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
    recompute: int,
) -> tuple[Part, ...]:
    """The parts of a plan, in the order of a step."""
    return (
        _packing(spec, config, packed),
        _varlen(config, hardware, dtype, packed),
        Part(
            name="chunked loss",
            state="on",
            why="logits are made a chunk at a time, for trained tokens only (checked on the loaded model)",
        ),
        _recompute(recompute, config.get_text_config().num_hidden_layers),
    )


def _packing(spec: RunSpec, config: PreTrainedConfig, packed: bool) -> Part:
    if packed:
        return Part(name="packing", state="on", why="rows side by side without padding, isolated by attention")
    if not spec.data.packing:
        return Part(name="packing", state="off", why="data.packing is false")
    return Part(name="packing", state="off", why=attention.why_not_isolated(config) or "unknown")


def _varlen(config: PreTrainedConfig, hardware: Hardware, dtype: DtypeName, packed: bool) -> Part:
    name = "variable-length attention kernel"
    if not packed:
        return Part(name=name, state="not applicable", why="rows are not packed")
    if hardware.kind == "cpu":
        return Part(name=name, state="not applicable", why="one attention call a document serves a processor best")
    if hardware.capability is not None and hardware.capability < (8, 0):
        return Part(name=name, state="off", why="flash kernels need compute capability 8.0 or newer")
    if reason := attention.why_not_varlen(config, "cuda", getattr(torch, dtype)):
        return Part(name=name, state="off", why=reason)
    return Part(name=name, state="on", why="one kernel for all documents")


def _recompute(recompute: int, num_layers: int) -> Part:
    if recompute == 0:
        return Part(name="recomputation", state="off", why="every layer's activations fit into memory")
    return Part(name="recomputation", state="on", why=f"{recompute} of {num_layers} layers are computed twice")
