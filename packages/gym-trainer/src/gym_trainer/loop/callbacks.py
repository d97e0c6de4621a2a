"""What the loop tells the world, and when it is told to stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from gym_sdk.cli.console import Progress
from gym_sdk.events import EventWriter
from gym_trainer.loop.interrupt import StopRequest

_SUMMARY_KEYS = ("train_runtime", "train_loss")


class EventCallback(TrainerCallback):
    """Every logged number and checkpoint of the main process into events.jsonl, every step into a progress."""

    def __init__(self, events: EventWriter, run_path: Path, progress: Progress | None = None) -> None:
        self.events = events
        self.run_path = run_path
        self.progress = progress

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._show(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._show(state)

    def _show(self, state: Any) -> None:
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
