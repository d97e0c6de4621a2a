"""Several adapters in one model, kept apart: one is trained, the others are frozen, each under its name.

peft holds them (`PeftModel.load_adapter`, `set_adapter`), its checkpoints hold them all, and transformers' Trainer
brings them all back. The trained one is always peft's `default`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gym_sdk.errors import ModelError, Where
from gym_sdk.spec.adapter import AdapterSpec, NamedAdapter, adapters_beside

if TYPE_CHECKING:
    from gym_serve.models.adapters import AdapterInfo

TRAINED = "default"


def look_at_beside(adapter: AdapterSpec) -> list[tuple[NamedAdapter, AdapterInfo]]:
    """The frozen adapters of a specification, by what their files say.

    Raises:
        ModelError: no adapter there, or one of another kind than the trained one.
    """
    from gym_serve.models import inspect_adapter

    others = [(other, inspect_adapter(other.source)) for other in adapters_beside(adapter)]
    if not others:
        return []
    start = getattr(adapter, "init_from", None)
    kind = inspect_adapter(start).kind if start is not None else adapter.kind
    for other, info in others:
        if info.kind != kind:
            raise ModelError(
                f"adapter.beside: {other.name} is of kind {info.kind}, and the trained adapter of kind {kind}",
                where=Where(file=other.source),
                hint="peft keeps adapters of one kind in a model",
            )
    return others


def add_beside(model: Any, adapter: AdapterSpec) -> None:
    """Load the frozen adapters of a specification into a peft model; which one computes stays as it is."""
    from gym_serve.models.adapters import add_frozen

    for other, info in look_at_beside(adapter):
        add_frozen(model, info.folder, name=other.name)


def beside_bytes(adapter: AdapterSpec) -> int:
    """What the frozen adapters take: peft holds their weights in float32."""
    from math import prod

    return sum(4 * prod(shape) for _, info in look_at_beside(adapter) for shape in info.shapes.values())


@contextmanager
def answering_as(model: Any, name: str) -> Iterator[None]:
    """The peft model with another of its adapters, for passes without gradients; afterwards the trained one again."""
    model.set_adapter(name, inference_mode=True)
    try:
        yield
    finally:
        model.set_adapter(TRAINED)
