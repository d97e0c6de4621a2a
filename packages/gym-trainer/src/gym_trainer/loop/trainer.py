"""One `transformers.Trainer` subclass for every gradient method.

What is Trainer's stays Trainer's: optimizer and schedule, gradient clipping, callbacks and trackers, mixed precision,
the format of optimizer and random states. What differs:

- an item of the dataloader is one whole optimizer step, so accumulation is ours (`loop.step`) and Trainer's stays 1;
- checkpoints are staged, checked and renamed (`loop.checkpoint`);
- a loss or gradient that is not finite ends the run before it touches the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from gym_sdk.errors import RunFailed
from gym_trainer.loop import checkpoint
from gym_trainer.loop.batch import RowSource, StepBatch
from gym_trainer.loop.dataset import StepDataset, StreamSteps
from gym_trainer.loop.forward import ForwardModel
from gym_trainer.loop.host_states import HostStates
from gym_trainer.loop.metrics import StepMeter
from gym_trainer.loop.one_weight import GradientNorm, OneWeightOptimizer, stepping_in_backward
from gym_trainer.loop.step import StepRunner

_KEPT_LOG_LINES = 1000


class GymTrainer(Trainer):
    """Trains with an objective over whole steps."""

    optimizer: torch.optim.Optimizer
    control: TrainerControl

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        runner: StepRunner,
        train_steps: StepDataset | StreamSteps,
        eval_rows: RowSource | None = None,
        eval_batch_size: int = 64,
        keep_checkpoints: int = 2,
        meter: StepMeter | None = None,
        loss_chunk_size: int | None = None,
        build_optimizer: Callable[[nn.Module, TrainingArguments], torch.optim.Optimizer] | None = None,
        optimizer_in_backward: bool = False,
        offload_optimizer: bool = False,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        """`args.output_dir` is the folder of the checkpoints."""
        self.optimizer_in_backward = optimizer_in_backward
        self.offload_optimizer = offload_optimizer
        self._gradient_norm = GradientNorm()
        self._while_training = ExitStack()
        self.runner = runner
        self.train_steps = train_steps
        self.keep_checkpoints = keep_checkpoints
        self.meter: StepMeter = meter or StepMeter()
        self.eval_batch_size = eval_batch_size
        self.loss_chunk_size = loss_chunk_size
        self._build_optimizer = build_optimizer
        self._staging_dir = Path(args.output_dir) / checkpoint.STAGING_NAME
        self._forward_model: ForwardModel | None = None
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_steps,
            eval_dataset=eval_rows,
            callbacks=[
                *([_EpochCallback(train_steps)] if isinstance(train_steps, StepDataset) else []),
                *(callbacks or []),
            ],
        )

    # Data

    def get_train_dataloader(self) -> DataLoader[StepBatch]:
        """Steps in order; shuffling is the data set's, and so is each rank's share."""
        # Every iterator of a loader draws a number; from dropout's generator, a resumed run would draw one too many.
        own = torch.Generator()
        return DataLoader(self.train_dataset, batch_size=1, collate_fn=itemgetter(0), generator=own)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[StepBatch], None]:
        """One step; the objective counts its own units."""
        item = next(epoch_iterator, None)
        return ([] if item is None else [item]), None

    def floating_point_ops(self, inputs: Any) -> int:
        """Counted by the meter, which knows of packing and frozen weights."""
        return 0

    # Optimizer

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Trainer's own by name, or the one that it has no name for."""
        chosen = cast(torch.optim.Optimizer | None, self.optimizer)  # None until this method is called
        if chosen is None and self._build_optimizer is not None:
            self.optimizer = self._build_optimizer(cast(nn.Module, self.model if model is None else model), self.args)
        inner = super().create_optimizer(model)
        if chosen is None and (self.optimizer_in_backward or self.offload_optimizer):
            self.optimizer = OneWeightOptimizer(inner, HostStates(self.args.device) if self.offload_optimizer else None)
            if self.optimizer_in_backward:
                self._while_training.enter_context(stepping_in_backward(self.optimizer, self._gradient_norm))
        return self.optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's own; weights move in backward passes until it ends."""
        with self._while_training:
            return super().train(*args, **kwargs)

    def use_weights_of_training(self, training: bool) -> None:
        """Schedule-free optimizers train at other weights than those that they have found; others do nothing."""
        switch = getattr(self.optimizer, "train" if training else "eval", None)
        if callable(switch):
            switch()

    # Steps

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The gradients of one whole step."""
        model.train()
        self.use_weights_of_training(True)
        step: StepBatch = inputs
        self.meter.start()
        result = self.runner.run(
            self._forward(model), step, backward=self.accelerator.backward, no_sync=lambda: self._no_sync(model)
        )
        if not math.isfinite(result.loss):
            raise self._not_finite(f"the loss is {result.loss}", step)
        self.meter.stop(result)
        self.state.num_input_tokens_seen += result.num_tokens
        self._current_step = step
        return torch.tensor(result.loss, device=self.args.device)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm before clipping, clipped or not. Of weights that have moved already there are no gradients left."""
        norm = self._gradient_norm.take() if self.optimizer_in_backward else super()._get_grad_norm(model, grad_norm)
        # With a loss scaler an overflow is expected now and then: the scaler skips that step by itself.
        if self.accelerator.scaler is None and not math.isfinite(float(norm)):
            raise self._not_finite(f"the gradient's norm is {float(norm)}", self._current_step)
        return norm

    def _no_sync(self, model: nn.Module) -> Any:
        return self.accelerator.no_sync(model)

    def _forward(self, model: nn.Module) -> ForwardModel:
        if self._forward_model is None or self._forward_model.wrapped is not model:
            self._forward_model = ForwardModel(model, loss_chunk_size=self.loss_chunk_size)
        return self._forward_model

    def _not_finite(self, what: str, step: StepBatch) -> RunFailed:
        number = self.state.global_step + 1
        described = self.train_steps.describe(step)
        shown = ", ".join(described[:8])
        more = len(described) - 8
        last, _ = checkpoint.newest(Path(self.args.output_dir))
        kept = f"the last good checkpoint is {last.name}" if last else "no checkpoint had been written yet"
        return RunFailed(
            f"{what} at step {number} (rows: {shown}{f' and {more} more' if more > 0 else ''}); {kept}",
            hint="lower train.learning_rate, or look at these rows",
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Trainer's numbers together with the step's own."""
        if "loss" in logs:
            logs = logs | self.meter.take(self.state)
        super().log(logs, start_time)
        # The whole history is in events.jsonl; every checkpoint would carry it once more.
        del self.state.log_history[:-_KEPT_LOG_LINES]

    # Evaluation

    @torch.no_grad()
    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """The objective over held-out rows, under training's masks, weighted as one large step would be."""
        rows: RowSource = eval_dataset if eval_dataset is not None else self.eval_dataset
        was_training = self.model.training
        self.model.eval()
        self.use_weights_of_training(False)
        dataset = StepDataset(
            rows,
            batch_size=self.eval_batch_size,
            seed=0,
            rank=self.args.process_index,
            world_size=self.args.world_size,
        )
        loss_sum = normaliser_sum = 0.0
        sums: dict[str, tuple[float, float]] = {}
        model = self._forward(self.model_wrapped)
        for number in range(len(dataset)):
            step = dataset[number]
            result = self.runner.run(model, step, backward=None)
            loss_sum += result.loss * result.normaliser
            normaliser_sum += result.normaliser
            for name, (total, count) in result.metrics.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + total, before[1] + count)
        self.model.train(was_training)
        values = {name: total / count for name, (total, count) in sums.items() if count}
        values = {"loss": loss_sum / normaliser_sum} | values | self.runner.objective.derived(values)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in values.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # Checkpoints

    def _get_output_dir(self, trial: Any) -> str:
        """Where Trainer writes a checkpoint's files: under the temporary name."""
        return str(self._staging_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        final = Path(self.args.output_dir) / name
        if self.args.should_save:
            checkpoint.clean_up(Path(self.args.output_dir))
        self._barrier()
        super()._save_checkpoint(model, trial)
        self._barrier()
        if self.args.should_save:
            best_step = self.state.best_global_step
            best = final.with_name(f"{PREFIX_CHECKPOINT_DIR}-{best_step}") if best_step else None
            self.state.best_model_checkpoint = str(best) if best else None
            self.state.save_to_json(str(self._staging_dir / name / TRAINER_STATE_NAME))
            if isinstance(self.train_steps, StreamSteps):
                place = self._staging_dir / name / checkpoint.DATA_NAME
                self.train_steps.save(place, num_steps=self.state.global_step)
            checkpoint.commit(self._staging_dir / name, final)
            self._staging_dir.rmdir()
            for _ in checkpoint.rotate(final.parent, keep=self.keep_checkpoints, best_step=best_step):
                pass
        self._barrier()

    def _barrier(self) -> None:
        if self.args.world_size > 1:
            dist.barrier()


class _EpochCallback(TrainerCallback):
    """Shuffles the steps of the epoch that begins; a resumed epoch gets the order it had."""

    def __init__(self, steps: StepDataset) -> None:
        self.steps = steps

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.set_epoch(state.global_step // len(self.steps))
