"""Steps as `gym train` takes them: planned, through the loop, with optimizer, clipping, metrics and events."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from gym_data import Document
from gym_sdk.events import EventWriter, MetricEvent, read_events
from gym_sdk.spec import RunSpec, spec_from_data
from gym_trainer.adapters import attach
from gym_trainer.bench.documents import rows_of
from gym_trainer.loop.fit import FitSettings, fit
from gym_trainer.objectives.sft import SftObjective
from gym_trainer.planning import DataShape, Plan, detect, plan

if TYPE_CHECKING:
    from gym_trainer.bench.train import BenchSettings


def measure_run(
    config: PreTrainedConfig, settings: BenchSettings, made: list[Document], device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Mean time of a step after the warm-up, the time of the warm-up, first and last loss, and the plan's words."""
    spec = _spec(settings, len(made), device, dtype)
    lengths = [len(document.ids) for document in made]
    shape = DataShape(
        num_rows=len(made),
        num_tokens=sum(lengths),
        longest_row_tokens=max(lengths),
        longest_step_tokens=sum(lengths),
    )
    hardware = detect("cuda" if device == "cuda" else "cpu", num_threads=torch.get_num_threads())
    chosen = plan(spec, config, hardware, data=shape, compare=False)
    torch.manual_seed(0)
    with torch.device(device):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = attach(base, spec.adapter, seed=0).model
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps = _fit(model, spec, chosen, made)
    seconds = [values["num_tokens"] / values["throughput_tokens_per_s"] for values in steps]
    measured = seconds[settings.num_warm_steps :]
    return {
        "step_time_s": sum(measured) / len(measured),
        "first_steps_s": sum(seconds[: settings.num_warm_steps]),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        "loss": steps[-1]["loss"],
        "first_loss": steps[0]["loss"],
    }


def _spec(settings: BenchSettings, num_rows: int, device: str, dtype: torch.dtype) -> RunSpec:
    adapter = {"kind": "lora", "rank": settings.rank, "alpha": 2 * settings.rank} if settings.rank else {"kind": "full"}
    return spec_from_data(
        {
            "model": {"source": "random", "dtype": str(dtype).removeprefix("torch.")},
            "data": {"train": [{"source": "random"}], "max_length": max(settings.lengths)},
            "adapter": adapter,
            "train": {
                "batch_size": num_rows,
                "max_steps": settings.num_warm_steps + settings.num_steps,
                "learning_rate": 1e-4,
                "schedule": "constant",
                "warmup_ratio": 0.0,
                "checkpoint_every_steps": 1_000_000,
            },
            "performance": {"device": device},
        }
    )


def _fit(model: Any, spec: RunSpec, chosen: Plan, made: list[Document]) -> list[dict[str, float]]:
    folder = Path(tempfile.mkdtemp(prefix="gym-bench-"))
    (folder / "checkpoints").mkdir()
    try:
        with EventWriter(folder / "events.jsonl") as events:
            fit(
                model,
                spec,
                FitSettings.of(chosen),
                SftObjective(),
                train_rows=rows_of(made),
                eval_rows=None,
                run_path=folder,
                events=events,
            )
        told = list(read_events(folder / "events.jsonl"))
    finally:
        shutil.rmtree(folder)
    return [dict(e.values) for e in told if isinstance(e, MetricEvent) and "throughput_tokens_per_s" in e.values]
