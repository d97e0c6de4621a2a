"""Numbers and tables of the report, the same in every form."""

from __future__ import annotations

from typing import Any

from gym_sdk.cli.console import format_duration
from gym_trainer.showing import percent

Row = tuple[str, str]

_LAYOUTS = {"packed": "packed", "shared": "packed, shared prompts once", "padded": "padded"}


def size(num_bytes: float | None) -> str:
    """`1.27 GB`, decimal."""
    if num_bytes is None:
        return "unknown"
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= scale:
            value = num_bytes / scale
            return (
                f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
            )
    return f"{num_bytes:.0f} bytes"


def count(number: float) -> str:
    """`134,515,008`."""
    return f"{number:,.0f}"


def number(value: float | None, digits: int = 3) -> str:
    """`0.0123`: so many significant digits."""
    return "unknown" if value is None else f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def share(value: dict[str, float]) -> str:
    """`97.5 % (87.1 to 99.6)`."""
    low, high = 100 * value["low"], 100 * value["high"]
    return f"{percent(value['value'])} ({low:.1f} to {high:.1f})"


def result_rows(task: dict[str, Any]) -> list[tuple[str, dict[str, float] | None, dict[str, float] | None]]:
    """The task's shares: (what, before, after); the fields below."""
    before, after = task["before"] or {}, task["after"] or {}
    rows = [("valid JSON", "valid"), ("fields right", "field_accuracy"), ("whole record right", "exact")]
    found = [(title, before.get(name), after.get(name)) for title, name in rows]
    fields = dict.fromkeys([*before.get("by_field", {}), *after.get("by_field", {})])
    return found + [
        (f"field {field}", before.get("by_field", {}).get(field), after.get("by_field", {}).get(field))
        for field in fields
    ]


def headline(facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The few numbers to read first: (what, value, remark)."""
    cards = []
    for task in facts["evaluation"]:
        before, after = task["before"], task["after"]
        shown = after or before
        remark = f"before: {percent(before['field_accuracy']['value'])}" if before and after else "before training"
        cards.append(("fields right", percent(shown["field_accuracy"]["value"]), remark))
        remark = f"before: {percent(before['valid']['value'])}" if before and after else "before training"
        cards.append(("valid JSON", percent(shown["valid"]["value"]), remark))
    training = facts["training"]
    if training:
        cards.append(("loss", number(training["last_loss"]), f"first step: {number(training['first_loss'])}"))
        speed = training["throughput_tokens_per_s"]
        cards.append(("tokens/s", number(speed), f"{count(training['num_tokens'])} tokens in all"))
    return cards


def run_rows(facts: dict[str, Any]) -> list[Row]:
    """What ran."""
    spec, fitted = facts["spec"], facts["fit"] or {}
    adapter = spec["adapter"]
    kind = adapter["kind"] if adapter["kind"] == "full" else f"{adapter['kind']}, rank {adapter['rank']}"
    rows = [
        ("base model", spec["model"]["source"]),
        ("method", spec["method"]["kind"]),
        ("adapter", kind),
        ("learning rate", number(spec["train"]["learning_rate"])),
        ("batch", _batch(spec)),
    ]
    if "num_trained" in fitted:
        part = fitted["num_trained"] / fitted["num_weights"]
        rows.append(
            ("trained weights", f"{count(fitted['num_trained'])} of {count(fitted['num_weights'])} ({part:.1%})")
        )
    rows += [(f"wrote {item['kind']}", f"{item['path']}/ ({size(item['size_bytes'])})") for item in facts["artifacts"]]
    return rows


def _batch(spec: dict[str, Any]) -> str:
    tokens = spec["train"].get("batch_tokens")
    return f"{spec['train']['batch_size']} rows a step" if tokens is None else f"{count(tokens)} tokens a step"


def data_rows(facts: dict[str, Any]) -> list[Row]:
    """What became of the rows."""
    data = facts["data"]
    if not data:
        return []
    rows = [
        ("rows read", count(data["rows_in"])),
        ("trained on", count(data["rows_train"])),
        ("held out", count(data["rows_eval"])),
        ("left out", count(data["rows_dropped"])),
        ("tokens", f"{count(data['tokens'])}, {count(data['trained_tokens'])} of them trained"),
        ("row length", f"median {data['lengths']['median']}, longest {data['lengths']['maximum']} tokens"),
        ("fingerprint", data["fingerprint"]),
    ]
    rows += [(f"left out: {reason}", count(dropped["count"])) for reason, dropped in data["dropped"].items()]
    if data["rows_truncated"]:
        rows.append(("cut at max_length", count(data["rows_truncated"])))
    rows += [("warning", warning) for warning in data.get("warnings", ())]
    return rows


def measure_rows(facts: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(measure of the method, first step, last step, held-out rows at the end)."""
    measures = (facts["training"] or {}).get("measures", {})
    return [
        (
            name,
            number(entry["first"]),
            number(entry["last"]),
            "not measured" if entry["held_out"] is None else number(entry["held_out"]),
        )
        for name, entry in measures.items()
    ]


def plan_rows(facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(what, predicted, measured)."""
    predicted, training = facts["plan"] or {}, facts["training"]
    fitted = facts["fit"] or {}
    if not predicted:
        return []
    speed, memory = predicted.get("speed") or {}, predicted.get("memory") or {}
    measured = training or {}
    rows = [
        ("device", f"{predicted.get('hardware', predicted.get('device'))}, {predicted.get('dtype')}", ""),
        (
            "micro-batch",
            f"{count(predicted['micro_batch_tokens'])} tokens",
            f"{count(fitted['micro_batch_tokens'])} tokens, {_LAYOUTS[fitted['layout']]}" if fitted else "",
        ),
        (
            "throughput",
            f"{number(speed.get('throughput_tokens_per_s'))} tokens/s",
            f"{number(measured.get('throughput_tokens_per_s'))} tokens/s" if measured else "",
        ),
        (
            "peak memory",
            size(memory_total(memory)),
            size(measured.get("peak_memory_bytes")) if measured else "",
        ),
    ]
    run = predicted.get("run") or {}
    if run:
        taken = sum(s["duration_s"] or 0 for s in facts["stages"] if s["state"] == "training")
        rows.append(("training time", format_duration(run["time_s"]), format_duration(taken) if taken else ""))
    if facts.get("cost") is not None:
        predicted_cost = run.get("cost")
        rows.append(("cost", "" if predicted_cost is None else f"{predicted_cost:.2f}", f"{facts['cost']:.2f}"))
    return rows


def memory_total(memory: dict[str, Any]) -> float | None:
    """Of a plan: the sum of its parts, or the number itself."""
    if "total" in memory:
        return memory["total"]
    parts = ("weights", "gradients", "optimizer", "activations", "workspace", "method", "overhead")
    return sum(memory[part] for part in parts if part in memory) or None


def stage_rows(facts: dict[str, Any]) -> list[Row]:
    """How long each stage took."""
    names = {"preparing": "prepare", "evaluating": "evaluate", "training": "train", "exporting": "export"}
    return [
        (f"{names.get(s['state'], s['state'])} {s['message']}".strip(), format_duration(s["duration_s"]))
        for s in facts["stages"]
        if s["duration_s"] is not None
    ]
