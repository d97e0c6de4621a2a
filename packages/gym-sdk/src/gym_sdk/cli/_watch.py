"""`gym jobs watch`: a job as it happens."""

from __future__ import annotations

import shutil
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from gym_sdk.cli import console
from gym_sdk.cli._plot import plot
from gym_sdk.client.types import JobEvent, JobInfo, JobState
from gym_sdk.events import ArtifactEvent, CheckpointEvent, LogEvent, LogLevel, MetricEvent, ProgressEvent, StateEvent

PLOT_HEIGHT = 10
HEADLINES = ("loss", "eval_loss", "reward", "token_accuracy", "throughput_tokens_per_s")
"""The metrics of the one line; `gym jobs get` shows all."""
LINE_INTERVAL_S = 5.0
"""Without a terminal: between two lines about metrics."""


@dataclass
class View:
    """What is known of a job, from its events."""

    name: str
    state: str = ""
    run_state: str = ""
    message: str = ""
    step: int = 0
    progress: ProgressEvent | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    losses: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    lines: deque[str] = field(default_factory=lambda: deque[str](maxlen=5))

    def add(self, event: JobEvent) -> None:
        """Take the next event."""
        run = event.run
        if run is None:
            self.state, self.message = event.state or "", event.message
            if event.state in (JobState.QUEUED, JobState.STARTING):
                self.run_state = ""
        elif isinstance(run, StateEvent):
            self.run_state, self.message = run.state or "", run.message
        elif isinstance(run, ProgressEvent):
            self.progress = run
        elif isinstance(run, MetricEvent):
            self.step = run.step
            self.metrics.update(run.values)
            if "loss" in run.values:
                # A resumed run repeats steps: the later value counts.
                while self.losses and self.losses[-1][0] >= run.step:
                    self.losses.pop()
                self.losses.append((run.step, run.values["loss"]))
        elif isinstance(run, CheckpointEvent):
            self.lines.append(f"checkpoint at step {run.step}")
        elif isinstance(run, ArtifactEvent):
            self.lines.append(f"{run.kind} is complete ({console.format_size(run.size_bytes)})")
        elif isinstance(run, LogEvent) and run.level is not LogLevel.DEBUG:
            prefix = "" if run.level is LogLevel.INFO else f"{run.level}: "
            self.lines.append(prefix + run.text)

    def summary(self) -> str:
        """One line."""
        run_state = self.run_state if self.state == JobState.RUNNING else ""
        parts = [self.name, f"{self.state} {run_state}".strip()]
        if self.progress is not None:
            parts.append(console.format_amount(self.progress.done, self.progress.total, self.progress.unit))
            if self.progress.eta_s is not None:
                parts.append(f"{console.format_duration(self.progress.eta_s)} left")
        elif self.step:
            parts.append(f"step {self.step}")
        parts += [f"{name} {self.metrics[name]:.4g}" for name in HEADLINES if name in self.metrics]
        return "  ".join(parts)

    def screen(self, width: int, *, unicode: bool) -> str:
        """Summary, curve and last lines."""
        curve = plot(self.losses, width, PLOT_HEIGHT, unicode=unicode) if len(self.losses) > 1 else []
        text = [self.summary()[: width - 1]]
        text += ["", "loss", *curve] if curve else []
        text += ["", *(line[: width - 1] for line in self.lines)] if self.lines else []
        return "\n".join([*text, self.message] if self.message else text)


def watch(job: JobInfo, events: Iterator[JobEvent]) -> JobState | None:
    """Show a job until it ends; returns the state it ended in."""
    return _watch_on_terminal(job, events) if console.is_terminal() else _watch_as_lines(job, events)


def _watch_on_terminal(job: JobInfo, events: Iterator[JobEvent]) -> JobState | None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    view, state = View(name=job.name), job.state
    unicode = (sys.stderr.encoding or "").lower().startswith("utf")
    with Live(console=Console(stderr=True), refresh_per_second=8, transient=False) as live:
        for event in events:
            view.add(event)
            state = event.state or state
            width = shutil.get_terminal_size().columns
            live.update(Text(view.screen(width, unicode=unicode), no_wrap=True))
    return state


def _watch_as_lines(job: JobInfo, events: Iterator[JobEvent]) -> JobState | None:
    view, state, last = View(name=job.name), job.state, None
    for event in events:
        view.add(event)
        state = event.state or state
        run = event.run
        quiet = isinstance(run, MetricEvent | ProgressEvent)
        # By the events' own time: a line every few seconds of the run, also when an old run is replayed.
        if isinstance(run, LogEvent | CheckpointEvent | ArtifactEvent):
            if not isinstance(run, LogEvent) or run.level is not LogLevel.DEBUG:
                console.err(view.lines[-1])
        elif not quiet or last is None or (event.time - last).total_seconds() >= LINE_INTERVAL_S:
            last = event.time
            console.err(view.summary() + (f"  {view.message}" if view.message and not quiet else ""))
    return state
