"""The small files of a run, each complete or absent, and what travels between its stages."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_sdk.rundir import RunDir
from gym_sdk.spec import RunSpec, sha256

if TYPE_CHECKING:
    from torch import Tensor

    from gym_data.streaming.stream import RowStream
    from gym_trainer.adapters import TrainableModel
    from gym_trainer.loop.batch import RowSource
    from gym_trainer.loop.fit import FitResult


@dataclass
class Trained:
    """A fitted model, with what it started from, so that an export can tell whether anything changed."""

    model: Any
    initial: dict[str, Tensor] = field(default_factory=dict)
    base_logits: Tensor | None = None

    def release(self) -> None:
        """Give the model's memory back, before another one is loaded."""
        self.model, self.initial, self.base_logits = None, {}, None


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What is trained on and what is held out, as the method reads it."""

    train: RowSource | RowStream
    eval: RowSource | None


def write_json(path: Path, value: Any) -> None:
    """Plain data as JSON, complete or absent."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False))


def write_text(path: Path, text: str) -> None:
    """Write and flush under a temporary name, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.partial")
    with staged.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    staged.rename(path)


def read_json(path: Path) -> Any:
    """The file's value, or None where there is no file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def of_fit(fitted: FitResult, attached: TrainableModel) -> dict[str, Any]:
    """What training measured, for the report."""
    return asdict(fitted) | {"num_trained": attached.num_trained, "num_weights": attached.num_weights}


def with_measured(plan: dict[str, Any], fitted: FitResult) -> dict[str, Any]:
    """The plan, with what came of it beside what it predicted."""
    rate = fitted.num_tokens / fitted.compute_time_s if fitted.compute_time_s else None
    measured = {
        "micro_batch_tokens": fitted.micro_batch_tokens,
        "packed": fitted.layout != "padded",
        "throughput_tokens_per_s": rate,
        "peak_memory_bytes": fitted.peak_memory_bytes,
        "time_s": fitted.compute_time_s,
    }
    return plan | {"measured": measured}


def artifact_metadata(spec: RunSpec, run: RunDir) -> dict[str, Any]:
    """Where an artifact came from."""
    data = read_json(run.data_dir / "report.json") or {}
    return {
        "run": run.path.name,
        "method": spec.method.kind,
        "spec_sha256": sha256(spec),
        "data_fingerprint": data.get("fingerprint"),
        "quantization": spec.model.quantization,
    }
