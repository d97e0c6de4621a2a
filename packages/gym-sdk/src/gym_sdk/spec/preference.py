"""`method:` kinds that learn from which answers are preferred: pairs, or answers with a label."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from gym_sdk.spec._base import SpecModel
from gym_sdk.spec.adapter import is_whole_model

if TYPE_CHECKING:
    from gym_sdk.spec.run import RunSpec

ReferenceKind = Literal["auto", "adapter_disabled", "frozen_copy", "precomputed"]

_SMOOTHED = ("sigmoid", "robust")
"""The losses that read `label_smoothing`."""
_UNTOUCHED_BASE = ("default", "eva")
"""Adapter initialisations that leave the base as it is, so that switching the adapter off gives the first model."""


class WeightedLoss(SpecModel):
    """A loss that is added to the main one."""

    name: Literal["sigmoid", "ipo", "hinge", "robust", "apo_zero", "apo_down", "sft"]
    """As in `method.loss`; and `sft`, the negative log-likelihood of the chosen answer, a token's mean (RPO,
    arXiv 2404.19733)."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """What it is multiplied by."""


class Dpo(SpecModel):
    """Direct preference optimisation (arXiv 2305.18290): chosen answers over rejected ones, near a reference."""

    data_objective: ClassVar[Literal["preference"]] = "preference"

    kind: Literal["dpo"] = "dpo"
    """Direct preference optimisation."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the model is held to the reference: the scale of the implicit reward. For `ipo`, the paper's tau."""

    loss: Literal["sigmoid", "ipo", "hinge", "robust", "apo_zero", "apo_down"] = "sigmoid"
    """What becomes of the rewards' margin: `sigmoid` (DPO), `ipo` (arXiv 2310.12036; a token's mean, as its authors
    use it), `hinge` (SLiC, arXiv 2305.10425), `robust` to wrong labels at the rate `label_smoothing` (arXiv
    2403.00409), `apo_zero` and `apo_down` (arXiv 2408.06266: chosen answers better, or worse, than the model's own)."""

    loss_weight: Annotated[float, Field(gt=0)] = 1.0
    """What `loss` is multiplied by, where `extra_losses` stand beside it."""

    extra_losses: list[WeightedLoss] = []
    """Losses added to it, such as `[{name: sft, weight: 0.2}]`, which keeps the chosen answers likely."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The share of pairs expected to be labelled the wrong way round. `sigmoid` with it is conservative DPO."""

    length_alpha: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The weight of the tokens by which the longer answer of a pair exceeds the shorter one (LD-DPO, arXiv
    2409.06411). Below 1, length itself is rewarded less."""

    reference: ReferenceKind = "auto"
    """Where reference log-probabilities come from: `adapter_disabled`, the model without its new adapter (no memory);
    `frozen_copy`, a copy of the trained weights as they were, right when starting from an adapter; `precomputed`, once
    before training, kept with the run. `auto` takes the first that is right; `precomputed` when every weight is
    trained."""

    reference_adapter: str | None = None
    """The adapter of `adapter.beside` that is the reference, by name, in place of the model as training begins: such as
    the SFT adapter in a second round of DPO."""


class Orpo(SpecModel):
    """Odds-ratio preference optimisation (arXiv 2403.07691): likelihood and preference in one step, no reference."""

    data_objective: ClassVar[Literal["preference"]] = "preference"

    kind: Literal["orpo"] = "orpo"
    """Odds-ratio preference optimisation."""

    odds_ratio_weight: Annotated[float, Field(gt=0)] = 0.1
    """The paper's lambda: the odds ratio's weight beside the likelihood of the chosen answer."""


class Simpo(SpecModel):
    """Simple preference optimisation (arXiv 2405.14734): mean log-probabilities with a target margin, no reference."""

    data_objective: ClassVar[Literal["preference"]] = "preference"

    kind: Literal["simpo"] = "simpo"
    """Simple preference optimisation."""

    beta: Annotated[float, Field(gt=0)] = 2.0
    """The scale of the reward, which is a token's mean log-probability."""

    gamma: Annotated[float, Field(ge=0)] = 0.5
    """The margin that the chosen answer's reward should have."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The share of pairs expected to be labelled the wrong way round."""

    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """The weight of the chosen answer's negative log-likelihood, a token's mean (CPO-SimPO)."""


class Cpo(SpecModel):
    """Contrastive preference optimisation (arXiv 2401.08417): DPO with a uniform reference, and likelihood."""

    data_objective: ClassVar[Literal["preference"]] = "preference"

    kind: Literal["cpo"] = "cpo"
    """Contrastive preference optimisation."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """The scale of the reward, which is the answer's log-probability."""

    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """What becomes of the margin; `ipo` takes a token's mean."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The share of pairs expected to be labelled the wrong way round; for `sigmoid`."""

    sft_weight: Annotated[float, Field(ge=0)] = 1.0
    """The weight of the chosen answer's negative log-likelihood, a token's mean."""


class Kto(SpecModel):
    """Kahneman-Tversky optimisation (arXiv 2402.01306): answers that are good or bad, without pairs."""

    data_objective: ClassVar[Literal["unpaired"]] = "unpaired"

    kind: Literal["kto"] = "kto"
    """Kahneman-Tversky optimisation. Pairs are read as one good and one bad answer."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """The scale of the implicit reward."""

    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """The weight of good answers. The paper wants weight x count of good and bad within 1 to 4/3 of each other."""

    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """The weight of bad answers."""

    reference: ReferenceKind = "auto"
    """Where reference log-probabilities come from: `adapter_disabled`, `frozen_copy` or `precomputed`; see kind dpo."""

    reference_adapter: str | None = None
    """The adapter of `adapter.beside` that is the reference, by name; see kind dpo."""


def chosen_reference(spec: RunSpec) -> Literal["adapter_disabled", "frozen_copy", "precomputed", "named_adapter"]:
    """What `method.reference: auto` means for this run: the cheapest reference that is the model training begins with.

    A model without its adapter is that only when the adapter is new and its initialisation left the base alone. An
    adapter that is named as the reference is another model.
    """
    if getattr(spec.method, "reference_adapter", None) is not None:
        return "named_adapter"
    wanted: ReferenceKind = getattr(spec.method, "reference", "auto")
    if wanted != "auto":
        return wanted
    if is_whole_model(spec.adapter):
        return "precomputed"
    return "frozen_copy" if _why_not_disabled(spec) else "adapter_disabled"


def find_preference_conflicts(spec: RunSpec) -> list[tuple[str, str]]:
    """Settings of preference methods that have no effect or cannot work."""
    found: list[tuple[str, str]] = []
    method = spec.method
    if isinstance(method, Dpo | Kto) and method.reference == "adapter_disabled" and (why := _why_not_disabled(spec)):
        found.append(("method.reference", f"{why}; use frozen_copy, precomputed or auto"))
    if isinstance(method, Dpo | Kto) and method.reference_adapter is not None and method.reference != "auto":
        found.append(("method.reference", "method.reference_adapter stands in its place; give one of them"))
    if isinstance(method, Dpo):
        losses = [method.loss, *(extra.name for extra in method.extra_losses)]
        if method.label_smoothing and not set(losses) & set(_SMOOTHED):
            found.append(("method.label_smoothing", f"has no effect on {', '.join(losses)}"))
        if "robust" in losses and not method.label_smoothing:
            found.append(("method.label_smoothing", "robust needs the expected share of wrong labels, above 0"))
        if len(set(losses)) < len(losses):
            found.append(("method.extra_losses", "each loss may stand there once; change its weight instead"))
    if isinstance(method, Cpo) and method.label_smoothing and method.loss != "sigmoid":
        found.append(("method.label_smoothing", f"has no effect on {method.loss}"))
    if getattr(method, "data_objective", "sft") != "sft" and spec.data.train_on not in ("all", "completion"):
        found.append(("data.train_on", f"has no effect: {method.kind} compares whole answers"))
    return found


def _why_not_disabled(spec: RunSpec) -> str | None:
    adapter = spec.adapter
    if is_whole_model(adapter):
        return f"adapter kind {adapter.kind} has no adapter to switch off"
    if getattr(adapter, "init_from", None) is not None:
        return "the run starts from adapter.init_from, and without that adapter the model is an earlier one"
    if getattr(adapter, "init", "default") not in _UNTOUCHED_BASE:
        return f"adapter.init {getattr(adapter, 'init', None)} changes the weights beside the adapter"
    return None
