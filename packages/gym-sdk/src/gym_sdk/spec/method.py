"""`method:` what is optimised."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gym_sdk.spec._base import SpecModel
from gym_sdk.spec.training_free import TrainingFreeGrpo


class Sft(SpecModel):
    """Supervised fine-tuning: next-token cross-entropy on the trained tokens."""

    kind: Literal["sft"] = "sft"
    """Supervised fine-tuning."""


MethodSpec = Annotated[Sft | TrainingFreeGrpo, Field(discriminator="kind")]
