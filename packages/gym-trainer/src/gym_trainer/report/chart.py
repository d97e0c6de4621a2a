"""Curves and interval bars as inline SVG, in the colours of the page (CSS variables), readable at any width."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 14, 32


def line_chart(
    points: Sequence[Point],
    *,
    title: str,
    label: Callable[[float], str],
    dots: Sequence[Point] = (),
    zero_based: bool = False,
) -> str:
    """A curve over steps: the values faint, their running mean strong; `dots` are measured apart, such as an evaluation
    loss."""
    if not points:
        return ""
    every = [*points, *dots]
    x_low, x_high = min(x for x, _ in every), max(x for x, _ in every)
    y_low = 0.0 if zero_based else min(y for _, y in every)
    y_high = max(y for _, y in every)
    ticks = nice_ticks(y_low, y_high)
    y_low, y_high = min(y_low, ticks[0]), max(y_high, ticks[-1])

    def place(point: Point) -> str:
        x = _LEFT + (WIDTH - _LEFT - _RIGHT) * ((point[0] - x_low) / (x_high - x_low) if x_high > x_low else 0.5)
        y = (
            HEIGHT
            - _BOTTOM
            - (HEIGHT - _TOP - _BOTTOM) * ((point[1] - y_low) / (y_high - y_low) if y_high > y_low else 0.5)
        )
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
    ]
    for tick in ticks:
        y = place((x_low, tick)).split(",")[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{y}" dy="4" text-anchor="end">{escape(label(tick))}</text>'
        )
    for step in sorted({x_low, (x_low + x_high) // 2, x_high}):
        x = place((step, y_low)).split(",")[0]
        anchor = "start" if step == x_low else "end" if step == x_high and x_high > x_low else "middle"
        parts.append(f'<text class="tick" x="{x}" y="{HEIGHT - 8}" text-anchor="{anchor}">step {step:,.0f}</text>')
    if len(points) > 1:
        raw = " ".join(place(point) for point in points)
        smooth = " ".join(place(point) for point in running_mean(points))
        parts.append(f'<polyline class="raw" points="{raw}"/><polyline class="curve" points="{smooth}"/>')
    else:
        x, y = place(points[0]).split(",")
        parts.append(f'<circle class="dot" cx="{x}" cy="{y}" r="4"/>')
    for point in dots:
        x, y = place(point).split(",")
        parts.append(f'<circle class="eval" cx="{x}" cy="{y}" r="4"/>')
    return "".join([*parts, "</svg>"])


def interval_bar(share: dict[str, float], kind: str) -> str:
    """A share from 0 to 1 as a dot with its interval."""
    low, value, high = (100 * share[name] for name in ("low", "value", "high"))
    return (
        f'<svg class="interval {kind}" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="track" x="0" y="4" width="100" height="2"/>'
        f'<rect class="range" x="{low:.2f}" y="2.5" width="{max(high - low, 0.6):.2f}" height="5" rx="1"/>'
        f'<rect class="value" x="{min(max(value - 0.6, 0), 98.8):.2f}" y="0" width="1.2" height="10"/></svg>'
    )


def running_mean(points: Sequence[Point]) -> list[Point]:
    """Each value averaged with those around it, over about a tenth of the curve."""
    half = max(1, len(points) // 20)
    means = []
    for i, (x, _) in enumerate(points):
        # The window shrinks towards both ends, so that the curve starts and ends where the values do.
        reach = min(half, i, len(points) - 1 - i)
        window = [y for _, y in points[i - reach : i + reach + 1]]
        means.append((x, sum(window) / len(window)))
    return means


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers from below `low` to above `high`."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / count
    magnitude = 10 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough)
    first = math.floor(low / step)
    last = math.ceil(high / step)
    return [round(i * step, 12) for i in range(first, last + 1)]
