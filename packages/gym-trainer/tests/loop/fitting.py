"""Fits a tiny model in a process of its own, which a test may kill at a chosen moment."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_rows import TinyStore, tiny_model, tiny_store

from gym_sdk.events import EventWriter, LogEvent, MetricEvent, read_events
from gym_sdk.spec import RunSpec, spec_from_data
from gym_trainer.adapters import attach
from gym_trainer.fast import attention
from gym_trainer.loop import checkpoint, trainer
from gym_trainer.loop.batch import StoreRows
from gym_trainer.loop.fit import FitResult, FitSettings, fit
from gym_trainer.objectives.sft import SftObjective

# A server that has the libraries loaded, and no threads yet, forks the children: a fork of this process, whose tests
# have used OpenMP's threads, would wait for them for ever. The processes and their SIGKILL are real.
_CHILDREN = multiprocessing.get_context("forkserver")
_CHILDREN.set_forkserver_preload(["peft", "gym_trainer.loop.fit", "gym_trainer.fast.attention"])


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
    eval_rows: StoreRows | None = None,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> FitResult:
    """One fit in this process, on one thread: sums are added in the same order in every process."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run_path.mkdir(exist_ok=True)
    (run_path / "checkpoints").mkdir(exist_ok=True)
    model = tiny_model()
    chosen = {
        "device": "cpu",
        "dtype": torch.float32,
        "attention": attention.choose(model.config, "cpu", torch.float32),
        "packed": packed,
        "micro_batch_tokens": 120,
    }
    try:
        with EventWriter(run_path / "events.jsonl") as events:
            return fit(
                attach(model, spec.adapter, seed=spec.seed).model,
                spec,
                FitSettings(**chosen | (settings or {})),
                SftObjective(),
                train_rows=StoreRows(store or tiny_store(48)),
                eval_rows=eval_rows,
                run_path=run_path,
                events=events,
                resume=resume,
                **options,
            )
    finally:
        torch.set_num_threads(num_threads)


def fit_and_die(run_path: Path, spec: RunSpec, arm: Callable[[], None], *, resume: bool = False, **options: Any) -> int:
    """The same in a child process, after `arm` has set its trap there; returns the child's exit code."""
    child = _CHILDREN.Process(target=_armed_fit, args=(arm, run_path, spec, resume, options))
    child.start()
    child.join(timeout=120)
    assert child.exitcode is not None
    return child.exitcode


def _armed_fit(arm: Callable[[], None], run_path: Path, spec: RunSpec, resume: bool, options: dict[str, Any]) -> None:
    arm()
    fit_tiny(run_path, spec, resume=resume, **options)


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after_step(step: int) -> Callable[[], None]:
    """A trap: die when this step has been logged."""
    return partial(_kill_after_step, step)


def _kill_after_step(step: int) -> None:
    original = trainer.GymTrainer.log

    def log(self: Any, values: dict[str, float], start_time: float | None = None) -> None:
        original(self, values, start_time)
        if self.state.global_step == step:
            kill_this_process()

    trainer.GymTrainer.log = log


def kill_within_commit(moment: str) -> Callable[[], None]:
    """A trap: die while the third checkpoint (step 6) is written."""
    return partial(_kill_within_commit, moment)


def _kill_within_commit(moment: str) -> None:
    calls = {"commit": 0, "sha256": 0}
    commit, sha256, rename = checkpoint.commit, checkpoint._sha256, Path.rename

    def counted_commit(staged: Path, final: Path) -> None:
        calls["commit"] += 1
        if calls["commit"] == 3 and moment == "before anything is flushed":
            (staged / "optimizer.pt").write_bytes(b"torn")
            kill_this_process()
        commit(staged, final)
        if calls["commit"] == 3 and moment == "after the rename":
            kill_this_process()

    def counted_sha256(path: Path, *, sync: bool = False) -> str:
        calls["sha256"] += calls["commit"] == 3
        if calls["sha256"] == 2 and moment == "between two files":
            kill_this_process()
        return sha256(path, sync=sync)

    def watched_rename(self: Path, target: Path) -> Path:
        if calls["commit"] == 3 and self.name == "checkpoint-6" and moment == "before the rename":
            kill_this_process()
        result = rename(self, target)
        if "deleted" in Path(target).name and moment == "within the deletion of an old one":
            kill_this_process()
        return result

    checkpoint.commit, checkpoint._sha256, Path.rename = counted_commit, counted_sha256, watched_rename


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
