"""`method: {kind: distillation}` learn the distribution of a larger model over the same vocabulary."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gym_sdk.spec._base import FilePath, SpecModel


class Distillation(SpecModel):
    """Knowledge distillation: the teacher's distribution at every trained token (arXiv 2306.13649)."""

    data_objective: ClassVar[Literal["sft"]] = "sft"

    kind: Literal["distillation"] = "distillation"
    """Knowledge distillation from a teacher with the same tokenizer."""

    teacher: Annotated[str, Field(min_length=1, examples=["Qwen/Qwen3-32B"]), FilePath(or_name=True)]
    """The teacher, named as `model.source` is. It stays frozen and in memory."""

    teacher_quantization: Literal["none", "nf4", "int8"] = "none"
    """How the teacher is stored."""

    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """`forward_kl`, KL(teacher || student), covers all that the teacher may say; `reverse_kl`, KL(student || teacher),
    keeps to what it says most; `jsd`, the generalised Jensen-Shannon divergence, lies between them."""

    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The teacher's share of the mixture in `jsd`: towards 0 like forward KL, towards 1 like reverse KL."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Both distributions' logits are divided by it; above 1 shows more of what the teacher finds less likely."""

    on_policy_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The share of rows whose last answer the student writes anew in each step, so that it learns from its own mistakes
    (generalised knowledge distillation). Writing costs time."""

    on_policy_max_tokens: Annotated[int, Field(ge=1)] = 128
    """The longest answer that the student writes."""

    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """The weight of the plain cross-entropy of the rows' own tokens beside the divergence; not where the student wrote
    them."""


def find_distillation_conflicts(method: Distillation) -> list[tuple[str, str]]:
    """Settings of distillation that have no effect beside the others."""
    found: list[tuple[str, str]] = []
    if method.beta != Distillation.model_fields["beta"].default and method.divergence != "jsd":
        found.append(("method.beta", f"has no effect on {method.divergence}, only on jsd"))
    if not method.on_policy_share and (
        method.on_policy_max_tokens != Distillation.model_fields["on_policy_max_tokens"].default
    ):
        found.append(
            ("method.on_policy_max_tokens", "has no effect: with on_policy_share 0 the student writes nothing")
        )
    if method.sft_weight and method.on_policy_share == 1:
        found.append(("method.sft_weight", "has no effect: with on_policy_share 1 the student writes every answer"))
    return found
