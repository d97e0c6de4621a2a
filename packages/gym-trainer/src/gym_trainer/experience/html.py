"""report.html: one file without any other, its plots drawn as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from gym_trainer.experience.report import GATE_TESTS

MAX_BYTES = 300_000

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#667;--line:#c9ced8;--a:#2463c4;--b:#b3541e;--ok:#2a7d4f;--bg:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e7e9ee;--soft:#9aa3b2;--line:#3a4250;--a:#7fb0ff;--b:#f0a06a;--ok:#6fcf97;
--bg:#14181f}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--bg);max-width:60rem;margin:2rem auto;
padding:0 1rem}
table{margin:.8rem 0;border-collapse:collapse;font-size:.9rem;display:block;overflow-x:auto}
td,th{border-bottom:1px solid var(--line);padding:.25rem .6rem;text-align:right;white-space:nowrap}
td:first-child,th:first-child,.text{text-align:left;white-space:normal}
svg{max-width:100%;height:auto}svg text{fill:var(--ink);font:12px system-ui,sans-serif}
.soft{color:var(--soft)}figure{margin:1rem 0}figcaption{color:var(--soft);font-size:.9rem}
"""


def render_html(report: dict[str, Any]) -> str:
    """The page. Long libraries are cut, and said to be, before the page passes 300 kB."""
    page = _page(report, max_items=len(report["library"]["items"]), max_steps=len(report["steps"]))
    if len(page.encode()) > MAX_BYTES:
        page = _page(report, max_items=200, max_steps=300)
    return page


def _page(report: dict[str, Any], *, max_items: int, max_steps: int) -> str:
    questions, library, money = report["questions"], report["library"], report["money"]
    parts = [
        f"<h1>{escape(report['name'])}</h1>",
        f"<p>Training-free GRPO. Student <code>{escape(report['student'])}</code>, teacher "
        f"<code>{escape(report['teacher'])}</code>, preset <code>{escape(report['preset'])}</code>, seed "
        f"{report['seed']}. {questions['train']} training, {questions['gate']} gate and {questions['test']} test "
        "questions; nothing in the loop has seen the test questions.</p>",
    ]
    if report["stopped_by"]:
        parts.append(f"<p><strong>Stopped early:</strong> {escape(report['stopped_by'])}.</p>")
    if report["accuracy"]:
        parts += [
            "<h2>Accuracy on the test questions</h2>",
            _figure(
                bars([(arm["name"], arm["accuracy"], arm["accuracy_interval_95"]) for arm in report["accuracy"]], 0, 1),
                "With 95% intervals (Wilson) over questions. Placebo and tips are as long as the library.",
            ),
            _table(
                ("library", "tokens", "accuracy", "95%", "difference", "95%"),
                [
                    (
                        arm["name"],
                        arm["num_tokens"],
                        f"{arm['accuracy']:.3f}",
                        _range(arm["accuracy_interval_95"]),
                        "" if arm.get("difference") is None else f"{arm['difference']:+.3f}",
                        "" if arm.get("difference") is None else _range(arm["difference_interval_95"]),
                    )
                    for arm in report["accuracy"]
                ],
            ),
        ]
    if report["not_measured"]:
        parts.append(f"<p>Not measured, for want of budget: {escape(', '.join(report['not_measured']))}.</p>")
    steps = report["steps"][:max_steps]
    if steps:
        parts += ["<h2>Steps</h2>", _figure(_steps_plot(steps), _STEPS_CAPTION), _steps_table(steps)]
        tests = sorted({step["gate"]["test"] for step in steps if step["gate"]})
        parts += [f'<p class="soft">{escape(GATE_TESTS[test])}</p>' for test in tests]
    parts.append(f"<h2>Library: {len(library['items'])} items, {library['num_tokens']} tokens</h2>")
    items = library["items"][:max_items]
    measured = [item for item in items if item["worth"]]
    if measured:
        rows = [(item["name"], item["worth"]["difference"], item["worth"]["interval_95"]) for item in measured]
        low = min(0.0, *(row[2][0] for row in rows))
        high = max(0.0, *(row[2][1] for row in rows))
        parts.append(
            _figure(bars(rows, low, high), "Worth: accuracy with the library less accuracy without the item, 95%.")
        )
    parts.append(
        _table(
            ("item", "text", "helpful", "harmful"),
            [(item["name"], item["text"], item["helpful"], item["harmful"]) for item in items],
            text_columns=(0, 1),
        )
    )
    if len(items) < len(library["items"]):
        parts.append(f"<p>{len(library['items']) - len(items)} more items stand in experience/library.yaml.</p>")
    parts += ["<h2>Money</h2>", _money(money)]
    if report["did_not_work_out"]:
        parts += ["<h2>What did not work out</h2>", _table(("what", "times"), report["did_not_work_out"].items())]
    body = "\n".join(parts)
    title = escape(report["name"])
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>\n{body}\n'
        "</body></html>\n"
    )


_STEPS_CAPTION = (
    "Mean reward of each batch under the working library (line), and on the gate the accepted library (hollow) beside "
    "the candidate (full; green where it was accepted)."
)


def bars(rows: Sequence[tuple[str, float, Sequence[float]]], low: float, high: float) -> str:
    """Horizontal bars with intervals over a common axis from `low` to `high`."""
    left, width, row_height = 190, 480, 26
    span = (high - low) or 1.0

    def x(value: float) -> float:
        return left + width * (min(max(value, low), high) - low) / span

    height = row_height * len(rows) + 30
    shapes = [f'<svg viewBox="0 0 {left + width + 70} {height}" role="img">']
    for number, (name, value, (lower, upper)) in enumerate(rows):
        y = 6 + number * row_height
        begin, end = sorted((x(0.0), x(value)))
        middle = y + 9
        short = name if len(name) <= 28 else name[:27] + "…"
        shapes.append(
            f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(short)}</text>'
            f'<rect x="{begin:.1f}" y="{y}" width="{max(1.0, end - begin):.1f}" height="18" fill="var(--a)" '
            f'opacity=".75"/><path d="M{x(lower):.1f} {middle}H{x(upper):.1f}" stroke="var(--ink)" stroke-width="2"/>'
            f'<text x="{x(max(upper, value)) + 6:.1f}" y="{y + 13}">{value:.3f}</text>'
        )
    bottom = height - 18
    for value in _ticks(low, high):
        shapes.append(
            f'<path d="M{x(value):.1f} {bottom - 4}v4" stroke="var(--line)"/>'
            f'<text x="{x(value):.1f}" y="{height - 4}" text-anchor="middle" class="soft">{value:.2f}</text>'
        )
    shapes.append(f'<path d="M{x(0.0):.1f} 2V{bottom}" stroke="var(--line)"/></svg>')
    return "".join(shapes)


def _ticks(low: float, high: float) -> list[float]:
    """Round values on an axis, 0 among them where it lies there; at most six."""
    span = (high - low) or 1.0
    rough = 10.0 ** math.floor(math.log10(span))
    step = next(size for each in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if span / (size := each * rough) <= 5 + 1e-9)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _steps_plot(steps: Sequence[dict[str, Any]]) -> str:
    left, width, top, height = 46, 660, 10, 190
    last = max(2, len(steps))

    def at(number: int, value: float) -> tuple[float, float]:
        return left + width * number / last, top + height * (1 - value)

    shapes = [f'<svg viewBox="0 0 {left + width + 20} {top + height + 34}" role="img">']
    for tick in range(5):
        _, y = at(0, tick / 4)
        shapes.append(
            f'<path d="M{left} {y:.1f}h{width}" stroke="var(--line)" stroke-width=".7"/>'
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick / 4:.2f}</text>'
        )
    line = [at(n, s["mean_reward"]) for n, s in enumerate(steps, 1) if s["mean_reward"] is not None]
    if line:
        path = " ".join(f"{'L' if n else 'M'}{px:.1f} {py:.1f}" for n, (px, py) in enumerate(line))
        shapes.append(f'<path d="{path}" fill="none" stroke="var(--a)" stroke-width="2"/>')
    for number, step in enumerate(steps, 1):
        label_x, _ = at(number, 0)
        if len(steps) <= 30 or number % (len(steps) // 15) == 0:
            shapes.append(f'<text x="{label_x:.1f}" y="{top + height + 18}" text-anchor="middle">{step["step"]}</text>')
        if step["gate"] is None:
            continue
        (x, current), (_, candidate) = (
            at(number, step["gate"][name]) for name in ("current_accuracy", "candidate_accuracy")
        )
        colour = "var(--ok)" if step["accepted"] else "var(--b)"
        shapes.append(
            f'<path d="M{x:.1f} {current:.1f}V{candidate:.1f}" stroke="{colour}"/>'
            f'<circle cx="{x:.1f}" cy="{current:.1f}" r="4" fill="none" stroke="{colour}"/>'
            f'<circle cx="{x:.1f}" cy="{candidate:.1f}" r="4" fill="{colour}"/>'
        )
    return "".join([*shapes, "</svg>"])


def _steps_table(steps: Sequence[dict[str, Any]]) -> str:
    return _table(
        (
            "step",
            "groups kept",
            "mean reward",
            "operations",
            "gate difference",
            "lower bound",
            "level",
            "accepted",
            "items",
        ),
        [
            (
                step["step"] if step["kind"] == "batch" else step["kind"],
                f"{step['num_groups_kept']} of {step['num_questions']}",
                "" if step["mean_reward"] is None else f"{step['mean_reward']:.3f}",
                len(step["applied"]),
                f"{step['gate']['mean_difference']:+.3f}" if step["gate"] else "",
                f"{step['gate']['lower_bound']:+.3f}" if step["gate"] else "",
                f"{step['gate']['alpha']:.4f}" if step["gate"] else "",
                "yes" if step["accepted"] else "no",
                step["num_items"],
            )
            for step in steps
        ],
    )


def _money(money: dict[str, Any]) -> str:
    names = ("calls", "prompt_tokens", "completion_tokens", "cost_usd", "lost_usd", "busy_s")
    rows = [
        (
            purpose,
            *(f"{money[purpose][name]:.4f}" if "usd" in name else f"{money[purpose][name]:,.0f}" for name in names),
        )
        for purpose in ("training", "evaluation")
    ]
    ours, paper = money["training_per_100_questions"], money["published"]
    same = paper["cost_usd_at_these_prices"]
    compared = [
        (
            "this run, for 100 questions",
            f"${ours['cost_usd']:.2f}",
            f"{ours['tokens']:,}",
            f"{ours['busy_s'] / 3600:.2f}",
        ),
        (
            f"the paper ({paper['source']}), as claimed",
            f"${paper['cost_usd']:.2f}",
            f"{paper['prompt_tokens'] + paper['completion_tokens']:,}",
            f"{paper['hours']:.2f}",
        ),
    ]
    if same is not None:
        compared.append(("the paper's tokens at these prices", f"${same:.2f}", "", ""))
    head = ("", "calls", "prompt tokens", "answer tokens", "cost (USD)", "at most lost (USD)", "time of calls (s)")
    return _table(head, rows) + _table(("training", "cost", "tokens", "hours"), compared)


def _table(head: Sequence[str], rows: Any, *, text_columns: Sequence[int] = ()) -> str:
    top = "".join(
        f'<th class="text">{escape(name)}</th>' if n in text_columns else f"<th>{escape(name)}</th>"
        for n, name in enumerate(head)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="text">{escape(str(cell))}</td>' if n in text_columns else f"<td>{escape(str(cell))}</td>"
            for n, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _range(pair: Sequence[float]) -> str:
    return f"{pair[0]:.3f} to {pair[1]:.3f}"
