"""`method:` what is optimised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from gym_sdk.spec._base import SpecModel
from gym_sdk.spec.distillation import Distillation, find_distillation_conflicts
from gym_sdk.spec.preference import Cpo, Dpo, Kto, Orpo, Simpo, find_preference_conflicts
from gym_sdk.spec.scoring import Classification, Reward
from gym_sdk.spec.training_free import TrainingFreeGrpo

if TYPE_CHECKING:
    from gym_sdk.spec.run import RunSpec


class Sft(SpecModel):
    """Supervised fine-tuning: next-token cross-entropy on the trained tokens."""

    data_objective: ClassVar[Literal["sft"]] = "sft"

    kind: Literal["sft"] = "sft"
    """Supervised fine-tuning."""

    loss: Literal["nll", "dft"] = "nll"
    """`nll` is cross-entropy. `dft` weighs each token's loss by the probability that the model gives it already (DFT,
    arXiv 2508.05629), so that tokens it cannot explain pull less; for data that teaches what the model half knows."""

    neftune_alpha: Annotated[float, Field(ge=0)] = 0.0
    """Uniform noise on the embeddings of up to alpha / sqrt(length x width) while training (NEFTune, arXiv 2310.05914).
    5 to 15 suit small chat data; 0 is none."""


class Pretrain(SpecModel):
    """Continued pretraining: next-token cross-entropy on every token of plain text."""

    data_objective: ClassVar[Literal["sft"]] = "sft"

    kind: Literal["pretrain"] = "pretrain"
    """Continued pretraining on plain text; rows of chats are refused."""


MethodSpec = Annotated[
    Sft | Pretrain | Dpo | Orpo | Simpo | Cpo | Kto | Reward | Classification | Distillation | TrainingFreeGrpo,
    Field(discriminator="kind"),
]


def find_method_conflicts(spec: RunSpec) -> list[tuple[str, str]]:
    """Settings of a method that cannot stand with each other or with the rest of the run."""
    found = find_preference_conflicts(spec)
    method = spec.method
    if isinstance(method, Reward | Classification):
        if spec.evaluation.tasks:
            found.append(("evaluation.tasks", f"{method.kind} gives numbers, and these tasks ask for written answers"))
        if spec.output.merge:
            found.append(("output.merge", f"the result of {method.kind} has a head of its own and is not merged"))
    if isinstance(method, Distillation):
        found += find_distillation_conflicts(method)
    if isinstance(method, Pretrain) and spec.data.train_on != "all":
        found.append(("data.train_on", "has no effect: pretrain learns every token of plain text, which has no turns"))
    return found
