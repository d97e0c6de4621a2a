"""Shuffling what is not in memory as a whole: a buffer of rows, of which a random one leaves for each that comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gym_data.store.read import Document

Group = tuple[Document, ...]
"""Documents that stay together: one, or chosen and rejected."""


class ShuffleBuffer:
    """Shuffles a pass over a source. Every row leaves exactly once; one that comes late cannot leave early."""

    def __init__(self, capacity: int, seed: tuple[int, ...]) -> None:
        """`capacity` counts rows; 1 keeps their order."""
        self.capacity = capacity
        self.slots: list[Group] = []
        self._random = np.random.default_rng(seed)

    @property
    def random_state(self) -> dict[str, Any]:
        """The state of the random numbers: plain data."""
        return dict(self._random.bit_generator.state)

    @random_state.setter
    def random_state(self, state: dict[str, Any]) -> None:
        self._random.bit_generator.state = state

    def fill(self, rows: Iterator[Group]) -> None:
        """Takes rows until the buffer is full or there are no more."""
        while len(self.slots) < self.capacity and (row := next(rows, None)) is not None:
            self.slots.append(row)

    def pop(self, rows: Iterator[Group]) -> Group | None:
        """A random row, whose place the next of `rows` takes; None when the pass is over."""
        self.fill(rows)
        if not self.slots:
            return None
        chosen = int(self._random.integers(len(self.slots)))
        self.slots[chosen], self.slots[-1] = self.slots[-1], self.slots[chosen]
        return self.slots.pop()
