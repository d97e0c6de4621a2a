"""`train:` how the optimiser walks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gym_sdk.spec._base import SpecModel


class TrainSpec(SpecModel):
    """Optimisation and its bookkeeping."""

    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the training rows."""

    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Stop after this many optimizer steps, whatever `epochs` says."""

    learning_rate: Annotated[float, Field(gt=0)] = 2.0e-4
    """The peak rate. 2e-4 suits LoRA; full fine-tuning wants about a tenth of it."""

    batch_size: Annotated[int, Field(ge=1)] = 16
    """Rows in one optimizer step, over all devices. How they are split into micro-batches never changes the loss."""

    batch_tokens: Annotated[int, Field(ge=8)] | None = None
    """Tokens in one optimizer step, over all devices, in the place of `batch_size`: for `data.packing_strategy:
    wrapped`, whose rows all have `data.max_length` tokens."""

    micro_batch_tokens: Annotated[int, Field(ge=8)] | None = None
    """The most tokens computed at once. Chosen by the plan when not given; halved when memory runs out."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """The rate's way down after the warm-up."""

    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """The share of all steps in which the rate rises from 0."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay. 0, because few adapter weights overfit by size."""

    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients longer than this are scaled down to it."""

    optimizer: Literal["adamw"] = "adamw"
    """The update rule."""

    checkpoint_every_steps: Annotated[int, Field(ge=1)] | None = None
    """Save a checkpoint each so many steps; about ten over the run when not given."""

    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """How many of the latest checkpoints stay on disk."""

    eval_every_steps: Annotated[int, Field(ge=1)] | None = None
    """Measure the evaluation loss each so many steps; at the end only when not given."""
