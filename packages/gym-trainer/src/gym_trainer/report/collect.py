"""The facts of a run, gathered from its folder: one dict, which is report.json and what the other forms are made of."""

from __future__ import annotations

import platform
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gym_sdk.events import CheckpointEvent, LogEvent, LogLevel, MetricEvent, StateEvent, read_events
from gym_sdk.rundir import RunDir
from gym_sdk.spec import RunSpec, load_spec
from gym_trainer.loop.cost import cost, running_time_s
from gym_trainer.records import read_json

REPORT_VERSION = 1
MAX_POINTS = 400
"""Of a curve in the report; events.jsonl has every step."""
MAX_EXAMPLES = 8
_PACKAGES = ("gym-trainer", "gym-serve", "gym-data", "gym-sdk", "torch", "transformers", "peft")
_SERIES = ("loss", "token_accuracy", "learning_rate", "grad_norm", "throughput_tokens_per_s", "peak_memory_bytes")
_MEASURES = ("rewards/", "logps/", "loss/", "nll", "kl", "divergence", "log_odds", "accuracy", "token_accuracy")
"""How the names of a method's own measures begin."""


def collect(run: RunDir) -> dict[str, Any]:
    """Everything that the report says. Parts whose stage has not happened are None or empty."""
    spec = load_spec(run.spec_path)
    metrics, evaluations, stages, warnings, num_resumes = _read_events(run)
    plan = read_json(run.plan_path) or {}
    fitted = read_json(run.path / "fit.json")
    training = None
    if metrics:
        steps = sorted(metrics)
        training = {
            "num_steps": steps[-1],
            "first_loss": metrics[steps[0]].get("loss"),
            "last_loss": metrics[steps[-1]].get("loss"),
            "num_tokens": sum(metrics[step].get("num_tokens", 0) for step in steps),
            "num_trained_tokens": sum(metrics[step].get("num_trained_tokens", 0) for step in steps),
            "throughput_tokens_per_s": _median([metrics[s].get("throughput_tokens_per_s") for s in steps]),
            "peak_memory_bytes": max(metrics[step].get("peak_memory_bytes", 0) for step in steps),
            "series": {
                name: _thinned([(s, metrics[s][name]) for s in steps if name in metrics[s]]) for name in _SERIES
            },
            "measures": _measures(metrics, evaluations),
            "evaluation_loss": [(step, values["eval_loss"]) for step, values in sorted(evaluations.items())],
            "num_resumes": num_resumes,
        }
    return {
        "version": REPORT_VERSION,
        "run": {"name": run.name, "id": run.id, "created_at": run.created_at.isoformat()},
        "state": run.state().value,
        "spec": spec.model_dump(mode="json"),
        "data": read_json(run.data_dir / "report.json"),
        "plan": plan,
        "fit": fitted,
        "training": training,
        "cost": _cost(run, spec),
        "evaluation": _evaluation(run),
        "stages": stages,
        "warnings": warnings,
        "artifacts": _artifacts(run),
        "environment": environment(),
    }


def _cost(run: RunDir, spec: RunSpec) -> float | None:
    """In the currency of the specification's price."""
    price_per_hour = spec.output.price_per_hour
    return None if price_per_hour is None else cost(running_time_s(read_events(run.events_path)), price_per_hour)


def environment() -> dict[str, Any]:
    """Versions, system and processor; nothing that identifies a person or a machine."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "device": _device(),
    }


def _measures(
    steps: dict[int, dict[str, float]], evaluations: dict[int, dict[str, float]]
) -> dict[str, dict[str, Any]]:
    """The method's own numbers: in the first step that has them, in the last, on held-out rows at the end; a curve."""
    found: dict[str, dict[str, Any]] = {}
    held_out = evaluations[max(evaluations)] if evaluations else {}
    for number, values in sorted(steps.items()):
        for name, value in values.items():
            if name.startswith(_MEASURES):
                found.setdefault(name, {"first": value, "series": []})["last"] = value
                found[name]["series"].append((number, value))
    return {
        name: entry | {"held_out": held_out.get(f"eval_{name}"), "series": _thinned(entry["series"])}
        for name, entry in sorted(found.items())
    }


def _read_events(
    run: RunDir,
) -> tuple[dict[int, dict[str, float]], dict[int, dict[str, float]], list[dict[str, Any]], list[str], int]:
    metrics: dict[int, dict[str, float]] = {}
    evaluations: dict[int, dict[str, float]] = {}
    warnings: list[str] = []
    stages: list[dict[str, Any]] = []
    began: datetime | None = None
    num_trainings = num_checkpoints = 0
    for event in read_events(run.events_path):
        if isinstance(event, MetricEvent):
            # A step that a killed process had done is done again by the next: the later one counts.
            target = evaluations if "eval_loss" in event.values else metrics
            target[event.step] = dict(event.values)
        elif isinstance(event, StateEvent) and event.state is not None:
            if stages and began is not None:
                stages[-1]["duration_s"] = (event.time - began).total_seconds()
            began = event.time
            num_trainings += event.state.value == "training"
            if not event.state.is_final:
                stages.append({"state": event.state.value, "message": event.message, "duration_s": None})
            else:
                began = None
        elif isinstance(event, LogEvent) and event.level in (LogLevel.WARNING, LogLevel.ERROR):
            warnings.append(event.text)
        elif isinstance(event, CheckpointEvent):
            num_checkpoints += 1
    return metrics, evaluations, stages, warnings, max(0, num_trainings - 1)


def _evaluation(run: RunDir) -> list[dict[str, Any]]:
    """Each task with its results before and after, side by side."""
    before = read_json(run.path / "evaluation" / "before.json") or []
    after = read_json(run.path / "evaluation" / "after.json") or []
    names = list(dict.fromkeys(task["name"] for task in [*before, *after]))
    tasks = []
    for name in names:
        pair = {
            moment: next((task for task in results if task["name"] == name), None)
            for moment, results in (("before", before), ("after", after))
        }
        shown = {m: {k: v for k, v in task.items() if k != "answers"} for m, task in pair.items() if task}
        tasks.append({"name": name, "before": None, "after": None, **shown, "examples": _examples(pair)})
    return tasks


def _examples(pair: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers to look at: what went wrong first, then what got better, so that nobody sees successes only."""
    answers = (pair["after"] or pair["before"] or {}).get("answers", [])
    earlier = {answer["place"]: answer for answer in (pair["before"] or {}).get("answers", [])}
    wrong = [answer for answer in answers if answer["wrong"] or not answer["valid"]]
    right = [answer for answer in answers if not answer["wrong"] and answer["valid"]]
    chosen = [*wrong[: MAX_EXAMPLES // 4], *right[: MAX_EXAMPLES // 2], *wrong[MAX_EXAMPLES // 4 : MAX_EXAMPLES // 2]]
    return [
        {**answer, "before": earlier[answer["place"]]["text"] if pair["after"] and answer["place"] in earlier else None}
        for answer in chosen
    ]


def _artifacts(run: RunDir) -> list[dict[str, Any]]:
    found = []
    for kind, folder in (("adapter", run.adapter_dir), ("model", run.model_dir)):
        if folder.is_dir():
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            found.append({"kind": kind, "path": folder.name, "size_bytes": size})
    return found


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most MAX_POINTS points, each the mean of its neighbours; not-finite values are left out."""
    points = [(step, value) for step, value in points if value - value == 0]
    if len(points) <= MAX_POINTS:
        return points
    size = len(points) / MAX_POINTS
    groups = [points[round(i * size) : round((i + 1) * size)] for i in range(MAX_POINTS)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups if group]


def _median(values: list[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} threads" if names else platform.machine()


def _device() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
