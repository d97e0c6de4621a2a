"""Writes train.jsonl and test.jsonl: short ratio questions with numeric answers, drawn with a fixed seed."""

from __future__ import annotations

import json
import random
from pathlib import Path

KINDS = (
    ("current ratio", "current assets of ${a} and current liabilities of ${b}", lambda a, b: a / b),
    ("debt to equity ratio", "total debt of ${a} and equity of ${b}", lambda a, b: a / b),
    ("return on investment", "a gain of ${a} on an investment that cost ${b}", lambda a, b: (a - b) / b),
    ("gross margin", "revenue of ${a} and cost of goods sold of ${b}", lambda a, b: (a - b) / a),
    ("inventory turnover", "cost of goods sold of ${a} and an average inventory of ${b}", lambda a, b: a / b),
)


def rows(rng: random.Random, count: int) -> list[dict[str, str]]:
    made: dict[str, dict[str, str]] = {}
    while len(made) < count:
        name, facts, formula = rng.choice(KINDS)
        b = rng.randrange(2, 40) * 500
        a = b + rng.randrange(1, 40) * 250
        question = f"A firm has {facts.format(a=f'{a:,}', b=f'{b:,}')}. What is its {name}, to two decimal places?"
        made[question] = {"question": question, "answer": f"{formula(a, b):.2f}"}
    return list(made.values())


if __name__ == "__main__":
    rng, folder = random.Random(0), Path(__file__).parent
    drawn = rows(rng, 140)
    for name, part in (("train.jsonl", drawn[:100]), ("test.jsonl", drawn[100:])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
