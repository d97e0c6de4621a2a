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

    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """The rate's way down after the warm-up: along a `cosine`, `linear`, not at all (`constant`), or only in the last
    steps (`wsd`, warm-up, stable, decay, arXiv 2404.06395)."""

    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.1
    """The share of all steps in which the rate of `wsd` falls."""

    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """The share of all steps in which the rate rises from 0."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay. 0, because few adapter weights overfit by size."""

    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients longer than this, all of them taken as one, are scaled down to it; `null` leaves them as they are."""

    optimizer: Literal[
        "adamw",
        "adamw_8bit",
        "paged_adamw_32bit",
        "paged_adamw_8bit",
        "adafactor",
        "muon",
        "lion_32bit",
        "lion_8bit",
        "ademamix",
        "ademamix_8bit",
        "sgd",
        "schedule_free_adamw",
        "schedule_free_sgd",
        "adamw_torch_8bit",
        "adamw_torch_4bit",
        "galore_adamw",
        "apollo_adamw",
    ] = "adamw"
    """The update rule, by transformers' and torch's names. `adamw_8bit` keeps its states in 8 bits, `paged_*` in host
    memory when the device is full (bitsandbytes; on a processor the same as unpaged). `muon` (torch's) orthogonalises
    the updates of matrices and leaves vectors, embeddings and the head to AdamW. `galore_adamw` and `apollo_adamw`
    keep states of a projected gradient, for full training."""

    checkpoint_every_steps: Annotated[int, Field(ge=1)] | None = None
    """Save a checkpoint each so many steps; about ten over the run when not given."""

    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """How many of the latest checkpoints stay on disk."""

    keep: Literal["last", "best"] = "last"
    """Which weights are the result: those of the `last` step, or of the evaluation with the lowest loss (`best`); every
    evaluation then saves a checkpoint."""

    early_stopping_patience: Annotated[int, Field(ge=1)] | None = None
    """Stop after so many evaluations in a row without a lower loss; never when not given."""

    eval_every_steps: Annotated[int, Field(ge=1)] | None = None
    """Measure the evaluation loss each so many steps; at the end only when not given."""
