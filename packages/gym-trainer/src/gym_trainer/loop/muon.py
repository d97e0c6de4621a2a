"""Muon for the matrices of a model and AdamW for the rest, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from gym_trainer.loop.matrices import hidden_matrices


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the matrices inside the model, AdamW for everything else, as one optimizer.

    Muon's updates are scaled to the size of AdamW's (`match_rms_adamw`, arXiv 2502.16982), so that one learning rate
    serves both.
    """

    param_groups: list[dict[str, Any]]

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


def muon_and_adamw(model: nn.Module, args: TrainingArguments) -> MuonAndAdamW:
    """The optimizer of a model's trained weights: Muon's are the matrices that are neither embedding nor head."""
    matrices = hidden_matrices(model)
    chosen = {id(p) for p in matrices}
    return MuonAndAdamW(
        matrices,
        [p for p in model.parameters() if p.requires_grad and id(p) not in chosen],
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
    )
