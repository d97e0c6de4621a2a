"""The report of a run: report.json for machines, report.md and report.html for people, from one set of figures.

Nothing in it depends on the clock of the process that writes it, so that a replay writes the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from gym_sdk.spec import RunSpec
from gym_sdk.spec.training_free import TrainingFreeGrpo
from gym_trainer.experience.budget import PURPOSES, Budget, Usage, cost_usd
from gym_trainer.experience.evaluation import Arm, Worth
from gym_trainer.experience.loop import Optimiser
from gym_trainer.experience.questions import Splits

FORMAT = "gym-experience-report/1"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A claim of training's cost."""

    source: str
    num_questions: int
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float
    hours: float


PUBLISHED = Published(
    source="arXiv 2510.08191",
    num_questions=100,
    prompt_tokens=38_000_000,
    completion_tokens=6_600_000,
    cost_usd=18.0,
    hours=6.0,
)
"""What the paper reports of its training on 100 competition problems with a model of 671 billion parameters."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything that a finished run has found."""

    spec: RunSpec
    method: TrainingFreeGrpo
    splits: Splits
    optimiser: Optimiser
    budget: Budget
    arms: list[Arm]
    worths: list[Worth] | None
    not_measured: list[str]
    """What the evaluation budget did not suffice for."""

    models: dict[str, str]
    """The names of student and teacher."""


def build_report(findings: Findings) -> dict[str, Any]:
    """The figures of a run, in plain data."""
    optimiser, method = findings.optimiser, findings.method
    library = optimiser.library
    nothing = next((arm for arm in findings.arms if arm.name == "nothing"), None)
    worth = {each.item_id: each.to_json() for each in findings.worths or ()}
    records = optimiser.provenance.to_json(library, worth)
    return {
        "format": FORMAT,
        "name": findings.spec.name,
        "student": findings.models["student"],
        "teacher": findings.models["teacher"],
        "preset": method.preset,
        "ground_truth": method.ground_truth,
        "seed": findings.spec.seed,
        "questions": {
            "train": len(findings.splits.train),
            "gate": len(findings.splits.gate),
            "test": len(findings.splits.test),
            "repeated_rows_left_out": findings.splits.num_repeated,
        },
        "accuracy": [arm.to_json(nothing) for arm in findings.arms],
        "not_measured": findings.not_measured,
        "library": {
            "sha256": library.sha256,
            "num_tokens": library.num_tokens_estimate,
            "placement": library.placement,
            "num_versions": len(optimiser.versions),
            "items": [
                {"id": item.id, "name": item.name, "text": item.text, **_of_item(records[item.id])}
                for item in library.items
            ],
        },
        "steps": [asdict(record) for record in optimiser.history],
        "stopped_by": optimiser.stopped_by,
        "did_not_work_out": dict(sorted(optimiser.tally.counts.items())),
        "money": _money(findings),
    }


def write_json(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=1, ensure_ascii=False, sort_keys=False) + "\n"


def _of_item(record: dict[str, Any]) -> dict[str, Any]:
    return {key: record[key] for key in ("first_step", "helpful", "harmful", "worth")}


def _money(findings: Findings) -> dict[str, Any]:
    spent = {purpose: findings.budget.spent[purpose] for purpose in PURPOSES}
    student, teacher = findings.method.student, findings.method.teacher or findings.method.student
    per_100 = 100.0 / len(findings.splits.train)
    training = spent["training"]
    published = Usage(prompt_tokens=PUBLISHED.prompt_tokens, completion_tokens=PUBLISHED.completion_tokens)
    return {
        **{purpose: {key: _figure(value) for key, value in each.to_json().items()} for purpose, each in spent.items()},
        "prices": {
            role: endpoint.price.model_dump() if endpoint.price else None
            for role, endpoint in (("student", student), ("teacher", teacher))
        },
        "caps": {purpose: findings.budget.caps[purpose].model_dump() for purpose in PURPOSES},
        "training_per_100_questions": {
            "cost_usd": round((training.cost_usd + training.lost_usd) * per_100, 6),
            "calls": round(training.calls * per_100, 1),
            "tokens": round((training.prompt_tokens + training.completion_tokens) * per_100),
            "busy_s": round(training.busy_s * per_100, 1),
        },
        "published": {
            **asdict(PUBLISHED),
            "cost_usd_at_these_prices": round(cost_usd(student.price, published), 2) if student.price else None,
        },
    }


def _figure(value: float) -> float:
    return round(value, 9) if isinstance(value, float) else value


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    questions, library, money = report["questions"], report["library"], report["money"]
    lines = [
        f"# {report['name']}: training-free GRPO",
        "",
        f"Student `{report['student']}`, teacher `{report['teacher']}`, preset `{report['preset']}`, seed "
        f"{report['seed']}. {questions['train']} training, {questions['gate']} gate and {questions['test']} test "
        "questions; the test questions were seen by nothing in the loop.",
        "",
    ]
    if report["stopped_by"]:
        lines += [f"**Stopped early**: {report['stopped_by']}.", ""]
    lines += ["## Accuracy on the test questions", ""]
    if report["accuracy"]:
        lines += [
            "| library | tokens | accuracy | 95% interval | difference to nothing | 95% interval |",
            "| --- | ---: | ---: | --- | ---: | --- |",
        ]
        for arm in report["accuracy"]:
            gain = arm.get("difference")
            lines.append(
                f"| {arm['name']} | {arm['num_tokens']} | {arm['accuracy']:.3f} | "
                f"{interval(arm['accuracy_interval_95'])} | "
                + (f"{gain:+.3f} | {interval(arm['difference_interval_95'])} |" if gain is not None else "| |")
            )
        lines += ["", "Accuracy by Wilson's interval over questions; differences are paired, by Student's t.", ""]
    elif not report["not_measured"]:
        lines += ["Not measured: the specification has no `data.eval` rows.", ""]
    if report["not_measured"]:
        lines += [f"Not measured, for want of budget: {', '.join(report['not_measured'])}.", ""]
    lines += [f"## Library: {len(library['items'])} items, {library['num_tokens']} tokens", ""]
    for number, item in enumerate(library["items"], 1):
        worth = item["worth"]
        measured = f"; worth {worth['difference']:+.3f} {interval(worth['interval_95'])}" if worth else ""
        lines.append(
            f"{number}. **{item['name']}**: {item['text']} "
            f"(helpful {item['helpful']}, harmful {item['harmful']}{measured})"
        )
    lines += ["", "## Steps", "", *_steps_table(report["steps"]), "", "## Money", "", *_money_table(money)]
    if report["did_not_work_out"]:
        lines += ["", "## What did not work out", ""]
        lines += [f"- {name}: {count}" for name, count in report["did_not_work_out"].items()]
    return "\n".join(lines) + "\n"


GATE_TESTS = {
    "betting": "The gate's bound is that of the test by betting, exact for any rewards.",
    "sign": "The gate's bound is above 0 exactly where the sign test accepts; its size takes the share of questions on "
    "which the libraries differ as it was seen.",
}
"""What a reader of the steps should know about the lower bound."""


def _steps_table(steps: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| step | questions | groups with contrast | mean reward | operations | gate: difference | lower bound | level "
        "| accepted | items |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for step in steps:
        gate = step["gate"]
        tested = f"{gate['mean_difference']:+.3f} | {gate['lower_bound']:+.3f} | {gate['alpha']:.4f}" if gate else "| |"
        reward = "" if step["mean_reward"] is None else f"{step['mean_reward']:.3f}"
        name = step["step"] if step["kind"] == "batch" else step["kind"]
        lines.append(
            f"| {name} | {step['num_questions']} | {step['num_groups_kept']} | {reward} | {len(step['applied'])} | "
            f"{tested} | {'yes' if step['accepted'] else 'no'} | {step['num_items']} |"
        )
    if tests := {step["gate"]["test"] for step in steps if step["gate"]}:
        lines += ["", *(GATE_TESTS[test] for test in sorted(tests))]
    return lines


def _money_table(money: dict[str, Any]) -> list[str]:
    names = ("", "calls", "prompt tokens", "answer tokens", "cost (USD)", "at most lost (USD)", "time of calls (s)")
    lines = [
        f"| {' | '.join(names)} |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for purpose in PURPOSES:
        spent = money[purpose]
        lines.append(
            f"| {purpose} | {spent['calls']} | {spent['prompt_tokens']} | {spent['completion_tokens']} | "
            f"{spent['cost_usd']:.4f} | {spent['lost_usd']:.4f} | {spent['busy_s']:.0f} |"
        )
    ours, paper = money["training_per_100_questions"], money["published"]
    same = paper["cost_usd_at_these_prices"]
    lines += [
        "",
        f"Training for 100 questions: ${ours['cost_usd']:.2f}, {ours['tokens']:,} tokens, {ours['busy_s'] / 60:.0f} "
        f"minutes of calls. The paper ({paper['source']}) claims about ${paper['cost_usd']:.0f}, "
        f"{(paper['prompt_tokens'] + paper['completion_tokens']) / 1e6:.1f} M tokens and {paper['hours']:.0f} hours "
        "for 100 questions with another model and longer answers"
        + (f"; its tokens would cost ${same:.2f} at the prices used here." if same is not None else "."),
    ]
    return lines


def interval(pair: list[float]) -> str:
    return f"[{pair[0]:.3f}, {pair[1]:.3f}]"
