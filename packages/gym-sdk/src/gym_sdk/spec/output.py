"""`output:` where results go."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gym_sdk.spec._base import SpecModel


class OutputSpec(SpecModel):
    """Artifacts and reports."""

    dir: Annotated[str, Field(min_length=1)] = "runs"
    """The folder in which the run's own folder is made; a relative one is taken from the current folder."""

    merge: bool = False
    """Also write the base model with the adapter merged in."""

    mirror: Annotated[str, Field(min_length=1)] | None = None
    """A second place that every checkpoint is copied to, for machines that may vanish: a folder (a mounted drive), or a
    URL that fsspec knows (`s3://bucket/runs`, `hf://user/repo`). `gym train --resume` also takes the run's folder
    there."""

    price_per_hour: Annotated[float, Field(ge=0, examples=[2.5])] | None = None
    """What an hour of this machine costs, in any currency: the plan then says what the run will cost, its metrics what
    it has cost so far, and its report what it did cost."""

    report_to: list[str] = []
    """Trackers beside events.jsonl, by transformers' names: tensorboard, wandb, mlflow, trackio."""
