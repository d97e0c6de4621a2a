"""What a person sees of a run on a terminal: rendered rows, tables, results. Readable without colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gym_data.report import Sample
    from gym_trainer.evaluation.json_fields import JsonFieldsResult

OPEN, CLOSE = "⟦", "⟧"
"""Around trained text."""

_MAX_CHARACTERS = 900


def rendered_rows(samples: Sequence[Sample]) -> str:
    """Rows as the model sees them, with what is trained in brackets."""
    lines = [f"{len(samples)} rows as the model sees them; what it is trained to write stands in {OPEN} {CLOSE}:"]
    for sample in samples:
        text = "".join(f"{OPEN}{part.text}{CLOSE}" if part.trained else part.text for part in sample.tokens)
        lines += [f"-- {sample.place} --", shortened(text, _MAX_CHARACTERS)]
    return "\n".join(lines) + "\n"


def shortened(text: str, limit: int) -> str:
    """The text, or its two ends around the number of characters left out. What is trained stands at the end."""
    if len(text) <= limit:
        return text
    head = limit // 3
    tail = limit - head
    return f"{text[:head]} [... {len(text) - limit:,} characters ...] {text[-tail:]}"


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Pairs in two columns."""
    pairs = list(rows)
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in pairs) + "\n"


def results_line(result: JsonFieldsResult) -> str:
    """A task's shares with their intervals."""
    valid, fields = result.valid, result.field_accuracy
    return (
        f"{result.name}: valid JSON {percent(valid.value)} ({percent(valid.low)} to {percent(valid.high)}), "
        f"fields right {percent(fields.value)} ({percent(fields.low)} to {percent(fields.high)}), {valid.total} rows"
    )


def percent(value: float) -> str:
    """`97.5 %`; no decimals at the ends."""
    return f"{100 * value:.0f} %" if value in (0, 1) else f"{100 * value:.1f} %"


def results_table(result: JsonFieldsResult) -> str:
    """A task's shares, field by field."""
    shares = {"valid JSON": result.valid, "fields right": result.field_accuracy, "whole record right": result.exact}
    shares |= {f"field {name}": share for name, share in result.by_field.items()}
    rows = [
        (
            name,
            f"{percent(share.value):>7}  ({percent(share.low)} to {percent(share.high)}), {share.count}/{share.total}",
        )
        for name, share in shares.items()
    ]
    return f"{result.name}, {result.valid.total} rows, 95 % intervals\n" + table(rows).rstrip("\n")


def before_and_after(facts: dict[str, Any]) -> str:
    """Each task of a report's facts: what it was, what it is."""
    lines = []
    for task in facts["evaluation"]:
        for what, name in (("valid JSON", "valid"), ("fields right", "field_accuracy")):
            shares = [task[moment][name] for moment in ("before", "after") if task[moment]]
            lines.append((f"{task['name']}: {what}", " -> ".join(percent(share["value"]) for share in shares)))
    return table(lines).rstrip("\n") if lines else ""
