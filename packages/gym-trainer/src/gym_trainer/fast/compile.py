"""Each decoder layer compiled by itself.

Layers of one kind share one compilation, so a deep model compiles as fast as a shallow one, and what surrounds the
layers stays ordinary Python. Compiled code is kept on disk between processes. When lengths change, the second
compilation makes them symbolic, and there is no third.

A compiled layer that must not keep its activations computes them again inside its own backward graph. That is cheaper
than running the layer twice: what no gradient needs, the last matrix product above all, is not computed again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gym_trainer.fast.layers import decoder_layers, forwards_replaced

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass
class CompileReport:
    """What compilation did while its context was entered."""

    num_graphs: int = 0
    graph_breaks: dict[str, int] = field(default_factory=dict)
    """How often compilation had to leave a layer, by reason."""


@contextmanager
def compiled_layers(model: nn.Module, num_recomputed: int = 0) -> Iterator[CompileReport]:
    """The model with compiled decoder layers, the first `num_recomputed` of them keeping nothing but their input.

    The report is filled when the context ends.

    Raises:
        ValueError: the model has fewer layers.
    """
    from torch._dynamo.utils import counters

    layers = decoder_layers(model)
    if num_recomputed > len(layers):
        raise ValueError(f"the model has {len(layers)} decoder layers, fewer than the {num_recomputed} to recompute")
    forwards = {
        layer: torch.compile(layer.forward, backend=_recomputing if number < num_recomputed else _keeping)
        for number, layer in enumerate(layers)
    }
    report = CompileReport()
    graphs_before = counters["stats"]["unique_graphs"]
    breaks_before = dict(counters["graph_break"])
    with _cache_on_disk(), forwards_replaced(forwards):
        try:
            yield report
        finally:
            report.num_graphs = counters["stats"]["unique_graphs"] - graphs_before
            report.graph_breaks = {
                reason.splitlines()[0]: count - breaks_before.get(reason, 0)
                for reason, count in counters["graph_break"].items()
                if count > breaks_before.get(reason, 0)
            }


# Two functions, because compiled code is looked up by backend: kept and recomputed layers share no code.


def _keeping(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    return _compile(graph, inputs, memory_budget=1.0)


def _recomputing(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    return _compile(graph, inputs, memory_budget=0.0)


def _compile(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], *, memory_budget: float) -> Any:
    """Inductor, with a share of the activations that may be kept."""
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    with functorch_config.patch(activation_memory_budget=memory_budget):
        return compile_fx(graph, inputs)


@contextmanager
def _cache_on_disk() -> Iterator[None]:
    """torch's default place is the temporary folder, which does not survive a restart."""
    if _CACHE_VARIABLE in os.environ:
        yield
        return
    from gym_sdk.folders import cache_dir

    os.environ[_CACHE_VARIABLE] = str(cache_dir() / "compiled")
    try:
        yield
    finally:
        del os.environ[_CACHE_VARIABLE]
