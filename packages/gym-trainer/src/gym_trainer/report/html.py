"""report.html: one file, no other file and no network needed, readable on a phone, light and dark."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from gym_sdk.cli.console import format_duration
from gym_trainer.report import words
from gym_trainer.report.chart import interval_bar, line_chart
from gym_trainer.showing import percent, shortened

MAX_BYTES = 300_000
_MAX_TEXT = 1500
_MEASURED = {
    "rewards/margins": "Reward margin",
    "rewards/accuracies": "Chosen preferred",
    "kl": "Divergence from the reference",
    "divergence": "Divergence from the teacher",
    "accuracy": "Accuracy",
}
"""The measures of methods that have a curve of their own."""


def render_html(facts: dict[str, Any]) -> str:
    """The page. Everything that comes from data or models is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "percent": percent,
        "size": words.size,
        "count": words.count,
        "duration": format_duration,
        "short": lambda text: shortened(text, _MAX_TEXT),
        "compact": lambda value: json.dumps(value, ensure_ascii=False),
    }
    folder = files("gym_trainer.report")
    template = environment.from_string((folder / "template.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        facts=facts,
        style=Markup((folder / "style.css").read_text(encoding="utf-8")),
        words=words,
        charts=_charts(facts),
        bar=lambda share, kind: Markup(interval_bar(share, kind)),
    )


def _charts(facts: dict[str, Any]) -> list[tuple[str, str, Markup]]:
    """(title, remark, picture) of each curve."""
    training = facts["training"]
    if not training:
        return []
    series, held_out = training["series"], training["evaluation_loss"]
    charts = [
        (
            "Loss",
            "each step, and its running mean" + ("; dots: held-out rows" if held_out else ""),
            line_chart(series["loss"], title="Loss over steps", label=compact, dots=held_out, zero_based=True),
        ),
        (
            "Throughput",
            "tokens a second, padding not counted",
            line_chart(
                series["throughput_tokens_per_s"],
                title="Tokens a second over steps",
                label=compact,
                zero_based=True,
            ),
        ),
        (
            "Gradient norm",
            "before clipping",
            line_chart(series["grad_norm"], title="Gradient norm over steps", label=compact, zero_based=True),
        ),
        (
            "Learning rate",
            "",
            line_chart(series["learning_rate"], title="Learning rate over steps", label=compact, zero_based=True),
        ),
    ]
    for name, title in _MEASURED.items():
        if entry := training["measures"].get(name):
            charts.append((title, name, line_chart(entry["series"], title=f"{title} over steps", label=compact)))
    return [(title, remark, Markup(picture)) for title, remark, picture in charts if picture]


def compact(value: float) -> str:
    """A tick's number in few characters: `0.5`, `2.5e-4`, `12k`."""
    if value == 0 or 0.01 <= abs(value) < 10_000:
        return f"{value:g}"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    mantissa, _, exponent = f"{value:.6e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"
