"""report.md: the same facts for a terminal, a pull request or a model card."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from gym_trainer.report import words
from gym_trainer.showing import CLOSE, OPEN, shortened

_MAX_TEXT = 600


def render_markdown(facts: dict[str, Any]) -> str:
    """The report as GitHub-flavoured Markdown."""
    spec = facts["spec"]
    lines = [
        f"# {facts['run']['name']}",
        "",
        f"{spec['method']['kind']} of {code(spec['model']['source'])}, run {facts['run']['id']}, {facts['state']}.",
        "",
    ]
    lines += [f"- {what}: **{value}** ({remark})" for what, value, remark in words.headline(facts)]
    if facts["warnings"]:
        lines += ["", "## Worth knowing", "", *(f"- {cell(text)}" for text in facts["warnings"])]
    for task in facts["evaluation"]:
        lines += ["", *evaluation_lines(task)]
        lines += ["", "### Answers, the wrong ones first", ""]
        for example in task["examples"]:
            lines += _example(example)
    if rows := words.measure_rows(facts):
        lines += ["", "## What the method measures", "", *table(("", "first step", "last step", "held-out rows"), rows)]
    lines += ["", "## Run", "", *table(("", ""), words.run_rows(facts))]
    lines += ["", "## Data", "", *table(("", ""), words.data_rows(facts))]
    if rows := words.plan_rows(facts):
        lines += ["", "## Plan and measurement", "", *table(("", "predicted", "measured"), rows)]
    if facts["data"]:
        lines += ["", "## Rows as the model saw them", "", f"Trained text stands in {OPEN} {CLOSE}."]
        for sample in facts["data"]["samples"]:
            text = "".join(f"{OPEN}{p['text']}{CLOSE}" if p["trained"] else p["text"] for p in sample["tokens"])
            lines += ["", f"{sample['place']}:", "", fenced(shortened(text, _MAX_TEXT))]
    lines += ["", "## Time and machine", "", *table(("", ""), [*words.stage_rows(facts), *_machine(facts)])]
    return "\n".join(lines) + "\n"


def evaluation_lines(task: dict[str, Any]) -> list[str]:
    """A task's table, with 95 % intervals."""
    rows = [
        (what, words.share(before) if before else "not measured", words.share(after) if after else "not measured")
        for what, before, after in words.result_rows(task)
    ]
    num_rows = (task["after"] or task["before"])["num_rows"]
    return [
        f"## Before and after: {task['name']}",
        "",
        f"Real, greedy answers to {num_rows} held-out rows; in brackets the 95 % interval.",
        "",
        *table(("", "before", "after"), rows),
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return lines + ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]


def cell(text: str) -> str:
    """Text that stays within its cell and is not markup."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def code(text: str) -> str:
    """Inline code, whatever back-ticks the text has."""
    fence = "`" * (max((len(run) for run in _runs(text)), default=0) + 1)
    return f"{fence}{text}{fence}" if fence == "`" else f"{fence} {text} {fence}"


def fenced(text: str) -> str:
    """A block of code, whatever back-ticks the text has."""
    fence = "`" * max(3, max((len(run) for run in _runs(text)), default=0) + 1)
    return f"{fence}text\n{text}\n{fence}"


def _runs(text: str) -> list[str]:
    import re

    return re.findall(r"`+", text)


def _example(example: dict[str, Any]) -> list[str]:
    verdict = "right"
    if not example["valid"]:
        verdict = "not JSON"
    elif example["wrong"]:
        verdict = f"wrong: {', '.join(example['wrong'])}"
    lines = [
        f"- {cell(shortened(example['prompt'], _MAX_TEXT))} ({cell(verdict)})",
        f"  - expected: {code(json.dumps(example['expected'], ensure_ascii=False))}",
    ]
    if example["before"] is not None:
        lines.append(f"  - before: {code(shortened(example['before'], _MAX_TEXT).replace(chr(10), ' '))}")
    lines.append(f"  - answer: {code(shortened(example['text'], _MAX_TEXT).replace(chr(10), ' '))}")
    return lines


def _machine(facts: dict[str, Any]) -> list[tuple[str, str]]:
    environment = facts["environment"]
    versions = ", ".join(f"{name} {value}" for name, value in environment["versions"].items())
    return [
        ("machine", f"{environment['device'] or environment['processor']}, {environment['system']}"),
        ("software", f"Python {environment['python']}, {versions}"),
    ]
