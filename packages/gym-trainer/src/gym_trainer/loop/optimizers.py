"""Optimizers and schedules by their names in a specification, all of them transformers' and torch's own."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from gym_sdk.errors import UserError
from gym_sdk.spec import TrainSpec
from gym_sdk.spec.adapter import AdapterSpec, LoraAdapter

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


def optimizer_arguments(train: TrainSpec) -> dict[str, Any]:
    """The part of `TrainingArguments` that chooses optimizer and schedule."""
    return {
        "optim": _TRANSFORMERS_NAMES.get(train.optimizer, train.optimizer),
        "optim_target_modules": "all-linear" if train.optimizer in ("galore_adamw", "apollo_adamw") else None,
        "learning_rate": train.learning_rate,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
    }


def schedule_arguments(train: TrainSpec, num_steps: int) -> dict[str, Any]:
    """The same for the schedule over so many steps."""
    decay_steps = max(1, math.ceil(train.decay_ratio * num_steps))
    return {
        "lr_scheduler_type": _SCHEDULES[train.schedule],
        "lr_scheduler_kwargs": {"num_decay_steps": decay_steps, "decay_type": "linear"}
        if train.schedule == "wsd"
        else {},
        "warmup_steps": math.ceil(train.warmup_ratio * num_steps),
    }


def optimizer_builder(
    train: TrainSpec, adapter: AdapterSpec
) -> Callable[[nn.Module, TrainingArguments], torch.optim.Optimizer] | None:
    """What builds an optimizer that transformers does not build by itself; None where it does."""
    if train.optimizer == "muon":
        return _muon
    factor = adapter.lora_plus_factor if isinstance(adapter, LoraAdapter) else None
    if factor is None:
        return None

    def build(model: nn.Module, args: TrainingArguments) -> torch.optim.Optimizer:
        from peft.optimizers import create_loraplus_optimizer

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


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the matrices inside the model, AdamW for everything else, as one optimizer.

    Muon's updates are scaled to the size of AdamW's (`match_rms_adamw`, arXiv 2502.16982), so that one learning rate
    serves both.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], others: Iterable[nn.Parameter], *, lr: float, weight_decay: float
    ) -> None:
        matrices, others = list(matrices), list(others)
        super().__init__([*matrices, *others], {"lr": lr})
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            self._parts.append(muon)
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=lr, weight_decay=0.0))
        self._share_groups()

    def _share_groups(self) -> None:
        """A schedule sets the rates in `param_groups`: they are the parts' own."""
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        """One update of every part."""
        loss = closure() if closure is not None else None
        for part in self._parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The parts' states, in order."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()


def _muon(model: nn.Module, args: TrainingArguments) -> torch.optim.Optimizer:
    kept_apart = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # pyright: ignore
    kept_apart |= {id(parameter) for parameter in head.parameters()} if isinstance(head, nn.Module) else set()
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2 and id(p) not in kept_apart]
    chosen = {id(p) for p in matrices}
    return MuonAndAdamW(
        matrices,
        [p for p in trained if id(p) not in chosen],
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
    )
