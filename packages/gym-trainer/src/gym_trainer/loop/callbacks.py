"""What the loop tells the world: events, progress with the time left, and whether to stop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from gym_sdk.cli.console import Progress
from gym_sdk.events import EventWriter
from gym_trainer.loop.interrupt import StopRequest

_PROGRESS_INTERVAL_S = 1.0
_SUMMARY_KEYS = ("train_runtime", "train_loss")


class EventCallback(TrainerCallback):
    """Every logged number, checkpoint and step of the main process into events.jsonl."""

    def __init__(self, events: EventWriter, run_path: Path, progress: Progress | None = None) -> None:
        self.events = events
        self.run_path = run_path
        self.progress = progress
        self._started_s = self._last_progress_s = 0.0
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started_s = time.monotonic()
        self._first_step = state.global_step
        self.events.progress("train", state.global_step, state.max_steps, "steps")
        if self.progress is not None:
            self.progress.update(state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now_s = time.monotonic()
        if now_s - self._last_progress_s >= _PROGRESS_INTERVAL_S or state.global_step == state.max_steps:
            self._last_progress_s = now_s
            per_step_s = (now_s - self._started_s) / (state.global_step - self._first_step)
            eta_s = per_step_s * (state.max_steps - state.global_step)
            self.events.progress("train", state.global_step, state.max_steps, "steps", eta_s=eta_s)
        if self.progress is not None:
            self.progress.update(state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs and not any(key in logs for key in _SUMMARY_KEYS):
            self.events.metric(state.global_step, {k: v for k, v in logs.items() if isinstance(v, int | float)})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.events.checkpoint(state.global_step, folder.relative_to(self.run_path).as_posix())


class StopCallback(TrainerCallback):
    """Ends the run after the step in which it was asked to, with a checkpoint."""

    def __init__(self, stop: StopRequest) -> None:
        self.stop = stop

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stop.requested and state.global_step < state.max_steps:
            control.should_training_stop = True
            control.should_save = True
