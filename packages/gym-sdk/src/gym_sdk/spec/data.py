"""`data:` where rows come from and which of their tokens are trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gym_sdk.spec._base import FilePath, SpecModel

DataFormat = Literal["auto", "openai", "alpaca", "prompt_completion"]


class DataSource(SpecModel):
    """One file or folder of rows."""

    source: Annotated[str, Field(min_length=1, examples=["data/train.jsonl"]), FilePath()]
    """A path; a relative one is taken from the folder of the spec's file. On a daemon also `file:ID`, an upload."""

    format: DataFormat = "auto"
    """The shape of the rows. `auto` looks at every row and stops when two shapes are mixed."""

    limit: Annotated[int, Field(ge=1)] | None = None
    """Use only the first rows, counted before any shuffling."""


class EvalSplit(SpecModel):
    """Held-out rows that give the evaluation loss."""

    split: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The share of training rows held out, drawn by content, so that equal rows never stand on both sides."""

    sources: list[DataSource] = []
    """Files of their own instead of a share of the training rows."""


class DataSpec(SpecModel):
    """The data of a run."""

    train: Annotated[list[DataSource], Field(min_length=1)]
    """The training rows."""

    eval: EvalSplit = EvalSplit()
    """The rows of the evaluation loss; none when empty."""

    max_length: Annotated[int, Field(ge=8)] = 2048
    """The most tokens a row may have."""

    overflow: Literal["drop", "truncate"] = "truncate"
    """What happens to a longer row: `truncate` cuts its end, and drops it, counted, when no trained token is left;
    `drop` leaves it out, counted."""

    train_on: Literal["all", "last"] = "all"
    """Which assistant turns are trained: `all`, each with its end-of-turn token, or only the `last`."""

    packing: bool = True
    """Put several rows side by side without padding; a row never sees its neighbours."""
