"""`method:` kinds that give numbers instead of text: a reward, or a class."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gym_sdk.spec._base import SpecModel


class Reward(SpecModel):
    """Reward modelling: a score for an answer, learned from pairs (Bradley-Terry, arXiv 2203.02155)."""

    data_objective: ClassVar[Literal["preference"]] = "preference"

    kind: Literal["reward"] = "reward"
    """Reward modelling: a linear head on the last token's hidden state."""

    centering: Annotated[float, Field(ge=0)] = 0.0
    """The weight of the squared sum of a pair's two scores, which holds their mean at 0 (arXiv 2312.09244). 0.01
    suits; 0 leaves it free."""


class Classification(SpecModel):
    """Sequence classification: the class of a prompt, from rows whose answer is the class's name."""

    data_objective: ClassVar[Literal["sft"]] = "sft"

    kind: Literal["classification"] = "classification"
    """Sequence classification: a linear head on the last token of the prompt."""

    labels: list[Annotated[str, Field(min_length=1)]] = []
    """The classes in the order of the head's outputs; those of the training rows, sorted, when not given. A row with
    another answer is an error."""
