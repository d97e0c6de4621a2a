"""`evaluation:` what the run must be better at, measured before and after by real generations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gym_sdk.spec._base import SpecModel
from gym_sdk.spec.data import DataSource


class JsonFieldsTask(SpecModel):
    """The answer is a JSON object, compared with the row's own answer field by field."""

    kind: Literal["json_fields"] = "json_fields"
    """Valid-JSON share and field accuracy."""

    data: DataSource
    """Held-out rows whose last assistant turn is the expected JSON object."""

    num_rows: Annotated[int, Field(ge=1)] | None = None
    """Use only the first rows."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    """The longest answer."""


class EvaluationSpec(SpecModel):
    """Generation tasks, run with the base model and with the tuned one."""

    tasks: list[JsonFieldsTask] = []
    """The tasks; none when empty."""

    before: bool = True
    """Also measure the base model, for comparison."""
