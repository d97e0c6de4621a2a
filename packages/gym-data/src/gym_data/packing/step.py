"""The rows of each optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray


def steps(
    lengths: Sequence[int] | NDArray[np.integer], *, batch_size: int, seed: int, epoch: int
) -> Iterator[NDArray[np.int64]]:
    """Row indices of each step of an epoch: `batch_size` rows, the last step what is left.

    The order depends on `seed` and `epoch` only, so that a resumed run goes on where it stopped.
    """
    order = np.random.default_rng((seed, epoch)).permutation(len(lengths)).astype(np.int64)
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]
