"""A method trained for a few steps, and what it moves on rows that it has not seen."""

from __future__ import annotations

from typing import Any

import torch

from gym_trainer.loop.dataset import StepDataset
from gym_trainer.loop.forward import ForwardModel
from gym_trainer.objectives.base import Objective


def before_and_after(
    objective: Objective,
    model: Any,
    start: Any,
    train: Any,
    held_out: Any,
    measure: str,
    *,
    num_steps: int,
    batch_size: int,
    num_held_out: int,
    learning_rate: float,
) -> tuple[float, float]:
    """The measure on the held-out rows, before training what of `model` is trainable and afterwards."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=learning_rate)
    forward = ForwardModel(model)

    def measured() -> float:
        step = StepDataset(held_out, batch_size=num_held_out, seed=0)[0]
        with torch.no_grad():
            result = start.runner.run(forward, step, backward=None)
        values = {name: total / count for name, (total, count) in result.metrics.items() if count}
        return (values | objective.derived(values))[measure]

    before = measured()
    steps = StepDataset(train, batch_size=batch_size, seed=0)
    model.train()
    for number in range(num_steps):
        if number and number % len(steps) == 0:
            steps.set_epoch(number // len(steps))
        start.runner.run(forward, steps[number % len(steps)], backward=lambda loss: loss.backward())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return before, measured()
