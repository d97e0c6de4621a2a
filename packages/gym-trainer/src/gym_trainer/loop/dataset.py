"""A data set whose items are whole optimizer steps, the same ones for the same seed, whoever asks and whenever."""

from __future__ import annotations

from collections.abc import Sequence

import torch.utils.data

from gym_data.packing import steps
from gym_trainer.loop.batch import RowSource, StepBatch


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


def share(indexes: Sequence[int], lengths: Sequence[int], rank: int, world_size: int) -> list[int]:
    """This rank's rows of a step: the longest row first, always to the rank with the fewest tokens so far."""
    loads = [0] * world_size
    shares: list[list[int]] = [[] for _ in range(world_size)]
    for place in sorted(range(len(indexes)), key=lambda place: -lengths[place]):
        lightest = loads.index(min(loads))
        loads[lightest] += lengths[place]
        shares[lightest].append(place)
    return [indexes[place] for place in sorted(shares[rank])]
