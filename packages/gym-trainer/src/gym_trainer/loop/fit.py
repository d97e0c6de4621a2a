"""From a specification and prepared data to a fitted model."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import EarlyStoppingCallback, PrinterCallback, TrainingArguments

from gym_data.streaming.stream import RowStream
from gym_sdk.cli.console import Progress
from gym_sdk.errors import ModelError, UserError
from gym_sdk.events import EventWriter
from gym_sdk.spec import RunSpec
from gym_trainer.fast.apply import FastPath, applied
from gym_trainer.fast.attention import (
    LeakingAttention,
    attention_of,
    check_isolation,
    check_sharing,
    is_moved_by_padding,
)
from gym_trainer.loop import checkpoint
from gym_trainer.loop.batch import Layout, RowSource
from gym_trainer.loop.callbacks import EventCallback, StopCallback
from gym_trainer.loop.cost import CostMeter
from gym_trainer.loop.dataset import StepDataset, StreamSteps
from gym_trainer.loop.forward import ForwardModel, unwrap
from gym_trainer.loop.interrupt import StopRequest
from gym_trainer.loop.metrics import StepMeter, peak_memory_bytes
from gym_trainer.loop.mirror import MirrorCallback, open_mirror
from gym_trainer.loop.optimizers import optimizer_arguments, optimizer_builder, schedule_arguments, state_classes
from gym_trainer.loop.step import StepRunner
from gym_trainer.loop.trainer import GymTrainer
from gym_trainer.objectives.base import Objective, Start

if TYPE_CHECKING:
    from gym_trainer.planning import Plan

_CHECKPOINTS_PER_RUN = 10


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """What the plan chose for the loop."""

    device: str
    dtype: torch.dtype
    attention: str
    packed: bool
    micro_batch_tokens: int
    shared_prompts: bool = False
    fused: bool = False
    offload: bool = False
    compile: bool = False
    recompute_layers: int = 0
    optimizer_in_backward: bool = False
    offload_optimizer: bool = False
    loss_chunk_size: int | None = None
    flops_per_token: float | None = None
    peak_flops_per_s: float | None = None

    @classmethod
    def of(cls, plan: Plan) -> FitSettings:
        """As the plan says."""
        return cls(
            device=plan.device,
            dtype=getattr(torch, plan.dtype),
            attention=plan.attention,
            packed=plan.packed,
            micro_batch_tokens=plan.micro_batch_tokens,
            shared_prompts=plan.shared_prompts,
            fused=plan.fused,
            offload=plan.offload,
            compile=plan.compile,
            recompute_layers=plan.recompute_layers,
            optimizer_in_backward=plan.optimizer_in_backward,
            offload_optimizer=plan.offload_optimizer,
            loss_chunk_size=plan.loss_chunk_size,
            flops_per_token=plan.speed.flops_per_token,
            peak_flops_per_s=plan.speed.peak_flops_per_s,
        )


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What was measured. The course of the loss is in events.jsonl, which also knows of earlier, killed processes."""

    num_steps: int
    max_steps: int
    paused: bool
    """Someone asked it to stop; the last checkpoint holds everything."""
    layout: Layout
    micro_batch_tokens: int
    num_tokens: int
    num_trained_tokens: int
    compute_time_s: float
    peak_memory_bytes: int
    resumed_from: int | None
    metrics: dict[str, float]
    """Of the last evaluation over held-out rows, if there was one."""


def fit(
    model: nn.Module,
    spec: RunSpec,
    settings: FitSettings,
    objective: Objective,
    *,
    train_rows: RowSource | RowStream,
    eval_rows: RowSource | None,
    run_path: Path,
    events: EventWriter,
    progress: Progress | None = None,
    stop: StopRequest | None = None,
    resume: bool = False,
) -> FitResult:
    """Train `model` in place, from the newest complete checkpoint when `resume` says so.

    Raises:
        RunFailed: a loss that is not finite, or a row that does not fit into memory.
    """
    checkpoints_dir = run_path / "checkpoints"
    stop = stop or StopRequest()
    num_rows = None if isinstance(train_rows, RowStream) else len(train_rows)
    args = training_arguments(spec, settings, num_rows, checkpoints_dir, has_eval=eval_rows is not None)
    mirror = open_mirror(spec.output.mirror, run_path.name) if spec.output.mirror is not None else None
    if resume and mirror is not None and (pulled := mirror.pull_newer(checkpoints_dir)) is not None:
        events.log("info", f"{pulled.name} was fetched from output.mirror")
    start = _start_from(checkpoints_dir, events) if resume else None
    layout = _layout(model, settings, events)
    micro_batch_tokens = settings.micro_batch_tokens
    if layout == "padded" and is_moved_by_padding(_causal(model)):
        _require_single_documents(spec)
        micro_batch_tokens = 1  # a row that is longer has a micro-batch of its own
        events.log("warning", "padding would change this model's logits: each row is a micro-batch of its own")

    runner = StepRunner(
        objective,
        micro_batch_tokens=micro_batch_tokens,
        layout=layout,
        device=args.device,
        whole_steps=settings.optimizer_in_backward,
        on_out_of_memory=lambda before, after: events.log(
            "warning", f"out of memory: micro-batches of {after} tokens from here on, instead of {before}; same steps"
        ),
    )
    fast = FastPath(
        fused=settings.fused,
        offload=settings.offload,
        compile=settings.compile,
        recompute_layers=settings.recompute_layers,
        loss_chunk_size=settings.loss_chunk_size,
    )
    meter = StepMeter(
        flops_per_token=settings.flops_per_token,
        peak_flops_per_s=settings.peak_flops_per_s,
        derived=objective.derived,
        cost=None
        if spec.output.price_per_hour is None
        else CostMeter(run_path / "events.jsonl", spec.output.price_per_hour),
    )
    with ExitStack() as stack:
        stack.enter_context(_trackers_under(run_path))
        stack.enter_context(_quiet())
        stack.enter_context(torch.serialization.safe_globals(state_classes(spec.train.optimizer)))
        if layout != "padded":
            stack.enter_context(attention_of(_causal(model), settings.attention))
        stack.enter_context(applied(model, fast, partial(_tell_unfused, events)))
        began = Start(
            model=ForwardModel(model, loss_chunk_size=settings.loss_chunk_size),
            runner=runner,
            settings=settings,
            run_path=run_path,
            events=events,
            stack=stack,
        )
        # Of a stream no row is known beforehand; the methods that need that are refused with the specification.
        known = [] if isinstance(train_rows, RowStream) else [train_rows]
        ready = objective.start(began, [*known, *([] if eval_rows is None else [eval_rows])])
        steps = _steps(ready[0] if known else train_rows, spec, args)
        eval_rows = None if eval_rows is None else ready[-1]
        if start is not None and isinstance(steps, StreamSteps):
            steps.restore(start / checkpoint.DATA_NAME, num_steps=step_of(start))
        trainer = GymTrainer(
            model,
            args,
            runner=runner,
            train_steps=steps,
            eval_rows=eval_rows,
            keep_checkpoints=spec.train.keep_checkpoints,
            meter=meter,
            loss_chunk_size=settings.loss_chunk_size,
            build_optimizer=optimizer_builder(spec.train, spec.adapter),
            optimizer_in_backward=settings.optimizer_in_backward,
            offload_optimizer=settings.offload_optimizer,
            callbacks=[EventCallback(events, run_path, progress), StopCallback(stop)],
        )
        if mirror is not None:
            trainer.add_callback(MirrorCallback(mirror, run_path, events))
        if spec.train.early_stopping_patience is not None:
            trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=spec.train.early_stopping_patience))
        # It prints every log line as a dict to standard output, which is for data.
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=str(start) if start else None)
        metrics: dict[str, float] = {}
        paused = stop.requested and trainer.state.global_step < trainer.state.max_steps
        if eval_rows is not None and not paused:
            metrics = trainer.evaluate()
        trainer.use_weights_of_training(False)
        trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
    return FitResult(
        num_steps=trainer.state.global_step,
        max_steps=trainer.state.max_steps,
        paused=paused,
        layout=layout,
        micro_batch_tokens=runner.micro_batch_tokens,
        num_tokens=meter.num_tokens,
        num_trained_tokens=meter.num_trained_tokens,
        compute_time_s=meter.compute_time_s,
        peak_memory_bytes=peak_memory_bytes(),
        resumed_from=step_of(start) if start else None,
        metrics=metrics,
    )


def _tell_unfused(events: EventWriter, reason: str) -> None:
    events.log("warning", f"layers are not fused: {reason}")


def _steps(rows: RowSource | RowStream, spec: RunSpec, args: TrainingArguments) -> StepDataset | StreamSteps:
    ranks = {"rank": args.process_index, "world_size": args.world_size}
    if isinstance(rows, RowStream):
        return StreamSteps(rows, batch_size=spec.batch_rows, **ranks)
    return StepDataset(rows, batch_size=spec.batch_rows, seed=spec.seed, **ranks)


def step_of(folder: Path) -> int:
    """N of a folder named `checkpoint-N`."""
    return int(folder.name.rpartition("-")[2])


def num_steps(spec: RunSpec, num_rows: int | None) -> int:
    """Optimizer steps of the whole run; `num_rows` is None where rows are read while training."""
    if spec.train.max_steps is not None:
        return spec.train.max_steps
    assert num_rows is not None, "a specification that streams says when to stop"
    return math.ceil(spec.train.epochs * math.ceil(num_rows / spec.batch_rows))


def training_arguments(
    spec: RunSpec, settings: FitSettings, num_rows: int | None, checkpoints_dir: Path, *, has_eval: bool
) -> TrainingArguments:
    """transformers' own form of the specification."""
    train = spec.train
    total = num_steps(spec, num_rows)
    every = train.checkpoint_every_steps or max(1, math.ceil(total / _CHECKPOINTS_PER_RUN))
    on_cuda = settings.device.startswith("cuda")
    return TrainingArguments(
        output_dir=str(checkpoints_dir),
        num_train_epochs=train.epochs,
        max_steps=total,
        **optimizer_arguments(train),
        **schedule_arguments(train, total),
        seed=spec.seed,
        use_cpu=settings.device == "cpu",
        bf16=on_cuda and settings.dtype == torch.bfloat16,
        fp16=on_cuda and settings.dtype == torch.float16,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        # A stream is put back to its place by us; Trainer would read and drop every row before it.
        ignore_data_skip=num_rows is None,
        # the best evaluation's weights must be on disk
        save_steps=train.eval_every_steps or every if train.keep == "best" else every,
        load_best_model_at_end=train.keep == "best",
        greater_is_better=False,
        restore_callback_states_from_checkpoint=train.early_stopping_patience is not None,
        eval_strategy="steps" if has_eval and train.eval_every_steps else "no",
        eval_steps=train.eval_every_steps,
        metric_for_best_model="loss" if has_eval and train.eval_every_steps else None,
        report_to=spec.output.report_to or "none",
        run_name=checkpoints_dir.parent.name,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cache=False,
    )


def _start_from(checkpoints_dir: Path, events: EventWriter) -> Path | None:
    """The newest complete checkpoint; those passed over are named, and moved out of the way of the next one."""
    checkpoint.clean_up(checkpoints_dir)
    found, passed_over = checkpoint.newest(checkpoints_dir)
    for torn in passed_over:
        events.log("warning", f"{torn.path.name} is incomplete and passed over: {torn.reason}")
        checkpoint.remove(torn.path)
    events.log(
        "info", f"resuming from {found.name}" if found else "no complete checkpoint: starting from the first step"
    )
    return found


def _layout(model: nn.Module, settings: FitSettings, events: EventWriter) -> Layout:
    """Packed where a forward of the model itself shows that documents do not see each other; prompts shared where one
    shows that it changes nothing."""
    if not settings.packed:
        return "padded"
    causal = _causal(model)
    with ExitStack() as stack:
        try:
            stack.enter_context(attention_of(causal, settings.attention))
            check_isolation(causal)
        except LeakingAttention as error:
            events.log("warning", f"{error.message}; training one document a row instead of packed rows")
            return "padded"
        if not settings.shared_prompts:
            return "packed"
        try:
            check_sharing(causal)
        except LeakingAttention as error:
            events.log("warning", f"{error.message}; a pair's prompt is computed twice")
            return "packed"
        return "shared"


def _require_single_documents(spec: RunSpec) -> None:
    if getattr(spec.method, "data_objective", "sft") == "preference":
        raise ModelError(
            "padding changes this model's logits, and a pair's two answers cannot be compared without it",
            hint="use a method over single answers, such as sft or kto",
        )


def _causal(model: nn.Module) -> Any:
    inner = unwrap(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


@contextmanager
def _trackers_under(run_path: Path) -> Iterator[None]:
    """TensorBoard's files go to the run's folder: transformers takes their place from the environment only."""
    name = "TENSORBOARD_LOGGING_DIR"
    before = os.environ.get(name)
    os.environ.setdefault(name, str(run_path / "trackers"))
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' bars for files of a second, and its warnings of its own deprecations while it sets up."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\..*")
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def check_trackers(names: list[str]) -> None:
    """Raise UserError for a tracker that transformers does not know or that is not installed."""
    from transformers.integrations import get_available_reporting_integrations

    known = {"tensorboard", "wandb", "mlflow", "trackio", "comet_ml", "clearml", "neptune", "dvclive", "swanlab"}
    installed = set(get_available_reporting_integrations())
    for name in names:
        if name not in installed:
            hint = f"pip install {name}" if name in known else f"known trackers: {', '.join(sorted(known))}"
            raise UserError(
                f"output.report_to: {name} is not installed" if name in known else f"no tracker {name}", hint=hint
            )
