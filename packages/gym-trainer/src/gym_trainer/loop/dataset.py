"""A data set whose items are whole optimizer steps, the same ones for the same seed, whoever asks and whenever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch.utils.data

from gym_data.packing import steps
from gym_data.streaming.stream import RowStream
from gym_trainer.loop.batch import Row, RowSource, StepBatch


class StepDataset(torch.utils.data.Dataset[StepBatch]):
    """The steps of one epoch at a time.

    A step's rows follow from the seed, the epoch and the step's number alone, so the position in the data is the
    number of steps done, and a resumed run goes on with the very next row.
    """

    def __init__(self, rows: RowSource, *, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        """`batch_size` counts the rows of all ranks together."""
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for this epoch, counted from 0."""
        self.epoch = epoch
        self._steps = [
            tuple(int(index) for index in step)
            for step in steps(self.rows.lengths_N, batch_size=self.batch_size, seed=self.seed, epoch=epoch)
        ]

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, number: int) -> StepBatch:
        indexes = self._steps[number]
        mine = share(indexes, [int(self.rows.lengths_N[i]) for i in indexes], self.rank, self.world_size)
        return StepBatch(
            epoch=self.epoch, number=number, row_indexes=indexes, rows=tuple(self.rows.row(index) for index in mine)
        )

    def describe(self, step: StepBatch) -> list[str]:
        """Where the rows of a step came from."""
        return [self.rows.describe(index) for index in step.row_indexes]


class StreamSteps(torch.utils.data.IterableDataset[StepBatch]):
    """The steps of rows that are read while training; there is no end to them.

    The position in the data is more than a number here, so a checkpoint holds it (`save`, `restore`).
    """

    def __init__(self, stream: RowStream, *, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        """Every rank reads the same rows and takes its share; `batch_size` counts those of all ranks together."""
        self.stream = stream
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.num_steps: int = 0
        self._places: list[str] = []

    def __iter__(self) -> Iterator[StepBatch]:
        while True:
            groups = list(islice(self.stream, self.batch_size))
            lengths = [sum(len(document.ids) for document in group) for group in groups]
            self._places = [f"row {group[0].row}" for group in groups]
            first = self.num_steps * self.batch_size
            mine = share(range(len(groups)), lengths, self.rank, self.world_size)
            rows = tuple(Row(index=first + place, documents=groups[place]) for place in mine)
            self.num_steps += 1
            yield StepBatch(
                epoch=0, number=self.num_steps - 1, row_indexes=tuple(range(first, first + len(groups))), rows=rows
            )

    def describe(self, step: StepBatch) -> list[str]:
        """Where the rows of the step that was taken last came from."""
        assert step.number == self.num_steps - 1
        return self._places

    def save(self, folder: Path, *, num_steps: int) -> None:
        """Write the position after `num_steps` steps, which must be those that were taken."""
        assert self.num_steps == num_steps, f"{self.num_steps} steps were taken, {num_steps} are done"
        self.stream.save(folder)

    def restore(self, folder: Path, *, num_steps: int) -> None:
        """Go on from a position that `save` wrote after `num_steps` steps."""
        self.stream.restore(folder)
        self.num_steps = num_steps


def share(indexes: Sequence[int], lengths: Sequence[int], rank: int, world_size: int) -> list[int]:
    """This rank's rows of a step: the longest row first, always to the rank with the fewest tokens so far."""
    loads = [0] * world_size
    shares: list[list[int]] = [[] for _ in range(world_size)]
    for place in sorted(range(len(indexes)), key=lambda place: -lengths[place]):
        lightest = loads.index(min(loads))
        loads[lightest] += lengths[place]
        shares[lightest].append(place)
    return [indexes[place] for place in sorted(shares[rank])]
