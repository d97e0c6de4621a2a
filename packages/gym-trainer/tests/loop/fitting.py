"""Fits a tiny model in a process of its own, which a test may kill at a chosen moment."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_rows import TinyStore, tiny_model, tiny_store

from gym_sdk.events import EventWriter, LogEvent, MetricEvent, read_events
from gym_sdk.spec import RunSpec, spec_from_data
from gym_trainer.adapters import attach
from gym_trainer.fast import attention
from gym_trainer.loop import checkpoint
from gym_trainer.loop.batch import StoreRows
from gym_trainer.loop.fit import FitResult, FitSettings, fit
from gym_trainer.objectives.sft import SftObjective

# Forked: the child has torch loaded already. Its processes and its SIGKILL are real.
_FORK = multiprocessing.get_context("fork")


def tiny_spec(**train: Any) -> RunSpec:
    adapter = train.pop("adapter", {"kind": "lora", "rank": 4, "dropout": 0.1})
    values = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-2, "checkpoint_every_steps": 2, "keep_checkpoints": 3}
    return spec_from_data(
        {
            "model": {"source": "tiny"},
            "data": {"train": [{"source": "rows.jsonl"}]},
            "adapter": adapter,
            "train": values | train,
        }
    )


def fit_tiny(
    run_path: Path,
    spec: RunSpec,
    *,
    resume: bool = False,
    packed: bool = True,
    store: TinyStore | None = None,
    **options: Any,
) -> FitResult:
    """One fit in this process."""
    run_path.mkdir(exist_ok=True)
    (run_path / "checkpoints").mkdir(exist_ok=True)
    model = tiny_model()
    settings = FitSettings(
        device="cpu",
        dtype=torch.float32,
        attention=attention.choose(model.config, "cpu", torch.float32),
        packed=packed,
        micro_batch_tokens=120,
    )
    with EventWriter(run_path / "events.jsonl") as events:
        return fit(
            attach(model, spec.adapter, seed=spec.seed).model,
            spec,
            settings,
            SftObjective(),
            train_rows=StoreRows(store or tiny_store(48)),
            eval_rows=None,
            run_path=run_path,
            events=events,
            resume=resume,
            **options,
        )


def fit_and_die(run_path: Path, spec: RunSpec, arm: Callable[[], None], *, resume: bool = False, **options: Any) -> int:
    """The same in a child process, after `arm` has set its trap there; returns the child's exit code."""

    def work() -> None:
        arm()
        fit_tiny(run_path, spec, resume=resume, **options)

    child = _FORK.Process(target=work)
    child.start()
    child.join(timeout=120)
    assert child.exitcode is not None
    return child.exitcode


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def losses(run_path: Path) -> dict[int, list[float]]:
    """Every loss that was logged for a step, in order; a step done twice has two."""
    found: dict[int, list[float]] = {}
    for event in read_events(run_path / "events.jsonl"):
        if isinstance(event, MetricEvent) and "loss" in event.values:
            found.setdefault(event.step, []).append(event.values["loss"])
    return found


def logs(run_path: Path) -> list[str]:
    return [event.text for event in read_events(run_path / "events.jsonl") if isinstance(event, LogEvent)]


def final_weights(run_path: Path) -> dict[str, torch.Tensor]:
    newest, _ = checkpoint.newest(run_path / "checkpoints")
    assert newest is not None
    files = [*newest.glob("adapter_model.safetensors"), *newest.glob("model.safetensors")]
    return load_file(files[0])


def optimizer_state(run_path: Path) -> dict[str, Any]:
    newest, _ = checkpoint.newest(run_path / "checkpoints")
    assert newest is not None
    return torch.load(newest / "optimizer.pt", weights_only=True)


def last_step(run_path: Path) -> int:
    newest, _ = checkpoint.newest(run_path / "checkpoints")
    assert newest is not None
    return json.loads((newest / "trainer_state.json").read_text())["global_step"]
