"""The reference of a preference method: the model as training began, whose log-probabilities hold the policy near.

| kind | what it costs | when it is right |
| --- | --- | --- |
| adapter disabled | a forward pass, no memory | a new adapter on an untouched base |
| frozen copy | a forward pass, the trained weights once more | always |
| precomputed | one pass before training, a file | always; the only one without a forward pass in each step |
| named adapter | a forward pass, that adapter's weights | when asked for: another model than the one that begins |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gym_sdk.spec import RunSpec
from gym_sdk.spec.preference import chosen_reference
from gym_trainer.adapters.beside import answering_as
from gym_trainer.loop.batch import Document, MicroBatch, Row, RowSource
from gym_trainer.loop.forward import ForwardModel, unwrap
from gym_trainer.objectives.base import Start

Logprobs = Callable[[ForwardModel, MicroBatch], Tensor]
"""The log-probabilities [N] of a micro-batch's documents, as the method adds them up."""

_VALUE = "reference_logprobs"


class Reference(ABC):
    """Gives the reference's log-probabilities of a micro-batch."""

    @classmethod
    def of(cls, spec: RunSpec) -> Reference:
        """What `method.reference` asks for, or the one that is right for this run."""
        name = getattr(spec.method, "reference_adapter", None)
        if name is not None:
            return OtherAdapter(name)
        kinds = {"adapter_disabled": AdapterDisabled, "frozen_copy": FrozenCopy, "precomputed": Precomputed}
        return kinds[chosen_reference(spec)]()

    def start(self, start: Start, rows: Sequence[RowSource], logprobs: Logprobs) -> list[RowSource]:
        """Get ready while the model has the weights that training begins with."""
        return list(rows)

    @abstractmethod
    def logprobs(self, model: ForwardModel, batch: MicroBatch, logprobs: Logprobs) -> Tensor:
        """The reference's log-probabilities [N], without a graph."""


class AdapterDisabled(Reference):
    """The model without its adapter."""

    def logprobs(self, model: ForwardModel, batch: MicroBatch, logprobs: Logprobs) -> Tensor:
        with torch.no_grad(), _without_dropout(model), unwrap(model.wrapped).disable_adapter():
            return logprobs(model, batch)


class OtherAdapter(Reference):
    """The model with a frozen adapter of `adapter.beside` in the place of the trained one."""

    def __init__(self, name: str) -> None:
        self.name = name

    def logprobs(self, model: ForwardModel, batch: MicroBatch, logprobs: Logprobs) -> Tensor:
        with torch.no_grad(), _without_dropout(model), answering_as(unwrap(model.wrapped), self.name):
            return logprobs(model, batch)


class FrozenCopy(Reference):
    """The trained weights as they were, put in the place of the current ones for a forward pass.

    Any kind of adapter, and a model without one, has its reference this way, and a copy is as large as what is trained.
    """

    def __init__(self) -> None:
        self._first: dict[str, Tensor] = {}

    def start(self, start: Start, rows: Sequence[RowSource], logprobs: Logprobs) -> list[RowSource]:
        trained = _trained(start.model)
        self._first = {name: parameter.detach().clone() for name, parameter in trained.items()}
        return list(rows)

    def logprobs(self, model: ForwardModel, batch: MicroBatch, logprobs: Logprobs) -> Tensor:
        with torch.no_grad(), _without_dropout(model), self._in_place(model):
            return logprobs(model, batch)

    @contextmanager
    def _in_place(self, model: ForwardModel) -> Iterator[None]:
        trained = _trained(model)
        current = {name: parameter.data for name, parameter in trained.items()}
        try:
            for name, parameter in trained.items():
                parameter.data = self._first[name]
            yield
        finally:
            for name, parameter in trained.items():
                parameter.data = current[name]


class Precomputed(Reference):
    """One pass over all rows before training; the numbers are kept with the run, for when it is resumed."""

    def start(self, start: Start, rows: Sequence[RowSource], logprobs: Logprobs) -> list[RowSource]:
        return [
            _WithReference(source, self._values(start, source, name, logprobs))
            for source, name in zip(rows, ("train", "eval"), strict=False)
        ]

    def logprobs(self, model: ForwardModel, batch: MicroBatch, logprobs: Logprobs) -> Tensor:
        return batch.document_values(_VALUE)

    def _values(self, start: Start, rows: RowSource, name: str, logprobs: Logprobs) -> list[tuple[float, ...]]:
        path = start.run_path / "data" / f"reference-{name}.npy"
        counts = [len(_all_documents(rows.row(index))) for index in range(len(rows))]
        flat = _read(path, sum(counts))
        if flat is None:
            start.events.log("info", f"reference log-probabilities of {len(rows)} rows ({name}), once")
            found: dict[int, list[float]] = {}

            def measure(batch: MicroBatch) -> None:
                values = iter(logprobs(start.model, batch).tolist())
                for row in batch.rows:
                    found[row.index] = [next(values) for _ in row.documents]

            with _without_dropout(start.model):
                start.runner.for_each(
                    (replace(row, documents=_all_documents(row)) for row in map(rows.row, range(len(rows)))), measure
                )
            flat = np.array([value for index in range(len(rows)) for value in found[index]])
            _write(path, flat)
        edges = np.cumsum([0, *counts])
        return [tuple(flat[a:b].tolist()) for a, b in pairwise(edges)]


class _WithReference:
    """Rows that carry the reference's log-probabilities of their documents."""

    def __init__(self, rows: RowSource, values: list[tuple[float, ...]]) -> None:
        self.rows = rows
        self.values = values
        self.lengths_N = rows.lengths_N

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Row:
        row = self.rows.row(index)
        return replace(row, document_values={**row.document_values, _VALUE: self.values[index]})

    def describe(self, index: int) -> str:
        return self.rows.describe(index)


def _all_documents(row: Row) -> tuple[Document, ...]:
    return (*row.documents, *row.statistics_documents)


def _trained(model: ForwardModel) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in unwrap(model.wrapped).named_parameters() if p.requires_grad}


@contextmanager
def _without_dropout(model: ForwardModel) -> Iterator[None]:
    """A reference that is not the same twice is none."""
    was_training = model.wrapped.training
    model.wrapped.eval()
    try:
        yield
    finally:
        model.wrapped.train(was_training)


def _read(path: Path, count: int) -> np.ndarray | None:
    if not path.is_file():
        return None
    values = np.load(path)
    return values if values.shape == (count,) else None


def _write(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.partial")
    with staged.open("wb") as file:
        np.save(file, values)
    staged.rename(path)
