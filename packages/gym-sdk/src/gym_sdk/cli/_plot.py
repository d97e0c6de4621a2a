"""A curve in text."""

from __future__ import annotations

import math
from collections.abc import Sequence

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a braille cell, by row and column."""


def plot(points: Sequence[tuple[float, float]], width: int, height: int, *, unicode: bool = True) -> list[str]:
    """Lines of a chart of `(x, y)` points, `width` characters by `height` lines, with the range of y at the left.

    Points that are not finite are left out. Several points in one column show as their mean.
    """
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not finite or height < 1:
        return []
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    labels = [f"{high:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels)) + 1
    columns = max(1, width - margin)
    across, down = (columns * 2, height * 4) if unicode else (columns, height)
    first, last = finite[0][0], finite[-1][0]
    sums: dict[int, list[float]] = {}
    for x, y in finite:
        column = round((x - first) / (last - first) * (across - 1)) if last > first else 0
        sums.setdefault(column, []).append(y)
    cells = [[0] * columns for _ in range(height)]
    for column, values in sums.items():
        mean = sum(values) / len(values)
        row = round((high - mean) / (high - low) * (down - 1)) if high > low else down // 2
        if unicode:
            cells[row // 4][column // 2] |= DOTS[row % 4][column % 2]
        else:
            cells[row][column] = 1
    lines: list[str] = []
    for number, row_cells in enumerate(cells):
        label = labels[0] if number == 0 else labels[1] if number == height - 1 else ""
        drawn = "".join((chr(0x2800 + bits) if unicode else "*") if bits else " " for bits in row_cells)
        lines.append(f"{label:>{margin - 1}} {drawn}".rstrip())
    return lines
