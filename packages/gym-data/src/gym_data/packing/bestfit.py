"""Best-fit decreasing: the longest row first, each into the fullest bin that still takes it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def micro_batches(
    rows: Sequence[int] | NDArray[np.integer], lengths: Sequence[int] | NDArray[np.integer], max_tokens: int
) -> list[list[int]]:
    """Bins of whole rows, each of at most `max_tokens`; a longer row has a bin of its own.

    `lengths[row]` is the length of a row. The result depends on its input only. Best-fit decreasing needs at most 11/9
    of the fewest bins (Johnson 1974).
    """
    sizes = np.asarray(lengths)[np.asarray(rows, dtype=np.int64)]
    order = np.argsort(-sizes, kind="stable")
    bins: list[list[int]] = []
    # (room left, bin), ascending: the first entry with enough room is the fullest bin that fits.
    room: list[tuple[int, int]] = []
    for index in order:
        size = int(sizes[index])
        at = bisect_left(room, (size, -1))
        if at == len(room):
            bins.append([])
            left, chosen = max_tokens, len(bins) - 1
        else:
            left, chosen = room.pop(at)
        bins[chosen].append(int(rows[index]))
        if left - size > 0:
            insort(room, (left - size, chosen))
    return bins
