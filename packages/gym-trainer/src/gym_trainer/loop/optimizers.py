"""Optimizers and schedules by their names in a specification, all of them transformers' and torch's own."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gym_sdk.errors import UserError
from gym_sdk.spec import TrainSpec
from gym_sdk.spec.adapter import AdapterSpec, LoraAdapter

if TYPE_CHECKING:  # names are checked before torch is imported, which takes seconds
    import torch
    from torch import nn
    from transformers import TrainingArguments

_TRANSFORMERS_NAMES = {"adamw": "adamw_torch_fused", "muon": "adamw_torch"}
"""Where transformers has another name; muon's own optimizer is built here, beside an AdamW of these arguments."""

_NEEDS = {
    "bitsandbytes": ("adamw_8bit", "paged_", "lion_", "ademamix"),
    "schedulefree": ("schedule_free_",),
    "torchao": ("adamw_torch_8bit", "adamw_torch_4bit"),
    "galore_torch": ("galore_",),
    "apollo_torch": ("apollo_",),
}
"""Packages by the beginnings of the names that need them."""

_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup", "wsd": "warmup_stable_decay"}


def require_optimizer(name: str) -> None:
    """Raise UserError, one line with the install command, where the optimizer's package is not installed."""
    for package, beginnings in _NEEDS.items():
        if name.startswith(beginnings) and importlib.util.find_spec(package) is None:
            raise UserError(
                f"train.optimizer: {name} needs {package}, which is not installed",
                hint=f"pip install {package.replace('_', '-')}",
            )


def state_classes(name: str) -> list[Any]:
    """Classes of the optimizer's package in its states, which a checkpoint may then hold beside tensors and numbers:
    GaLore and APOLLO keep their projections as objects."""
    if name == "galore_adamw":
        from galore_torch.galore_projector import GaLoreProjector

        return [GaLoreProjector]
    if name == "apollo_adamw":
        from apollo_torch.random_projector import GradientProjector

        return [GradientProjector]
    return []


def optimizer_arguments(train: TrainSpec) -> dict[str, Any]:
    """The part of `TrainingArguments` that chooses optimizer and schedule."""
    return {
        "optim": _TRANSFORMERS_NAMES.get(train.optimizer, train.optimizer),
        "optim_target_modules": "all-linear" if train.optimizer in ("galore_adamw", "apollo_adamw") else None,
        "learning_rate": train.learning_rate,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm or 0.0,
    }


def schedule_arguments(train: TrainSpec, num_steps: int) -> dict[str, Any]:
    """The same for the schedule over so many steps."""
    decay_steps = max(1, math.ceil(train.decay_ratio * num_steps))
    return {
        "lr_scheduler_type": _SCHEDULES[train.schedule],
        "lr_scheduler_kwargs": {"num_decay_steps": decay_steps, "decay_type": "linear"}
        if train.schedule == "wsd"
        else {},
        # the first step of a warm-up has rate 0: a run of one step has none
        "warmup_steps": min(math.ceil(train.warmup_ratio * num_steps), num_steps - 1),
    }


def optimizer_builder(
    train: TrainSpec, adapter: AdapterSpec
) -> Callable[[nn.Module, TrainingArguments], torch.optim.Optimizer] | None:
    """What builds an optimizer that transformers does not build by itself; None where it does."""
    if train.optimizer == "muon":
        from gym_trainer.loop.muon import muon_and_adamw

        return muon_and_adamw
    factor = adapter.lora_plus_factor if isinstance(adapter, LoraAdapter) else None
    if factor is None:
        return None

    def build(model: nn.Module, args: TrainingArguments) -> torch.optim.Optimizer:
        from peft.optimizers import create_loraplus_optimizer
        from transformers import Trainer

        kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)  # pyright: ignore[reportArgumentType]
        learning_rate = options.pop("lr")
        return create_loraplus_optimizer(
            model,  # pyright: ignore[reportArgumentType]
            kind,
            lr=learning_rate,
            loraplus_lr_ratio=factor,
            loraplus_weight_decay=args.weight_decay,
            **options,
        )

    return build
