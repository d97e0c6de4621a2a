"""Guards the preference methods: loss, gradient and metrics equal what their papers say, written out in float64."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from known import (
    OtherModel,
    build_preference,
    fill,
    gradients,
    known_model,
    label_store,
    logprobs_of,
    measure,
    pair_store,
    sigmoid,
    start_of,
)
from torch import Tensor

from gym_sdk.spec import Cpo, Dpo, Kto, Orpo, Simpo, WeightedLoss
from gym_trainer.loop.batch import StoreRows
from gym_trainer.objectives.dpo import DpoObjective
from gym_trainer.objectives.kto import MismatchedRows

RTOL, ATOL = 1e-5, 1e-7
"""Log-probabilities leave the chunked loss in float32, everything else is float64."""


class Answers:
    """One pair as a paper writes it: pi and ref are summed log-probabilities, `_mean` those of a token."""

    def __init__(self, policy: torch.nn.Module, reference: torch.nn.Module, pair: tuple[Any, Any]) -> None:
        self.tokens_w, self.tokens_l = (logprobs_of(policy, document) for document in pair)
        with torch.no_grad():
            self.ref_tokens_w, self.ref_tokens_l = (logprobs_of(reference, document) for document in pair)
        self.pi_w, self.pi_l = self.tokens_w.sum(), self.tokens_l.sum()
        self.ref_w, self.ref_l = self.ref_tokens_w.sum(), self.ref_tokens_l.sum()
        self.n_w, self.n_l = len(self.tokens_w), len(self.tokens_l)

    @property
    def h(self) -> Tensor:
        return (self.pi_w - self.ref_w) - (self.pi_l - self.ref_l)


def length_desensitised(a: Answers) -> Tensor:
    shared = min(a.n_w, a.n_l)

    def total(tokens: Tensor) -> Tensor:
        return tokens[:shared].sum() + 0.4 * tokens[shared:].sum()

    h = total(a.tokens_w) - total(a.ref_tokens_w) - total(a.tokens_l) + total(a.ref_tokens_l)
    return -torch.log(sigmoid(0.3 * h))


def odds(mean_logprob: Tensor) -> Tensor:
    return torch.exp(mean_logprob) / (1 - torch.exp(mean_logprob))


PAPERS: dict[str, tuple[Any, Callable[[Answers], Tensor]]] = {
    "dpo": (Dpo(beta=0.3), lambda a: -torch.log(sigmoid(0.3 * a.h))),
    "dpo, conservative": (
        Dpo(beta=0.3, label_smoothing=0.1),
        lambda a: -0.9 * torch.log(sigmoid(0.3 * a.h)) - 0.1 * torch.log(sigmoid(-0.3 * a.h)),
    ),
    "robust": (
        Dpo(beta=0.3, loss="robust", label_smoothing=0.2),
        lambda a: (-0.8 * torch.log(sigmoid(0.3 * a.h)) + 0.2 * torch.log(sigmoid(-0.3 * a.h))) / 0.6,
    ),
    "ipo": (
        Dpo(beta=0.3, loss="ipo"),
        lambda a: ((a.pi_w - a.ref_w) / a.n_w - (a.pi_l - a.ref_l) / a.n_l - 1 / 0.6) ** 2,
    ),
    "hinge": (Dpo(beta=0.3, loss="hinge"), lambda a: torch.clamp(1 - 0.3 * a.h, min=0)),
    "apo_zero": (
        Dpo(beta=0.3, loss="apo_zero"),
        lambda a: -sigmoid(0.3 * (a.pi_w - a.ref_w)) + sigmoid(0.3 * (a.pi_l - a.ref_l)) + 1,
    ),
    "apo_down": (
        Dpo(beta=0.3, loss="apo_down"),
        lambda a: sigmoid(0.3 * (a.pi_w - a.ref_w)) - sigmoid(0.3 * a.h) + 1,
    ),
    "length-desensitised": (Dpo(beta=0.3, length_alpha=0.4), length_desensitised),
    "several losses": (
        Dpo(
            beta=0.3,
            loss_weight=0.8,
            extra_losses=[WeightedLoss(name="sft", weight=0.5), WeightedLoss(name="hinge", weight=2.0)],
        ),
        lambda a: -0.8 * torch.log(sigmoid(0.3 * a.h)) - 0.5 * a.pi_w / a.n_w + 2 * torch.clamp(1 - 0.3 * a.h, min=0),
    ),
    "orpo": (
        Orpo(odds_ratio_weight=0.4),
        lambda a: -a.pi_w / a.n_w - 0.4 * torch.log(sigmoid(torch.log(odds(a.pi_w / a.n_w) / odds(a.pi_l / a.n_l)))),
    ),
    "simpo": (
        Simpo(beta=2.0, gamma=0.7),
        lambda a: -torch.log(sigmoid(2.0 * a.pi_w / a.n_w - 2.0 * a.pi_l / a.n_l - 0.7)),
    ),
    "simpo with likelihood": (
        Simpo(beta=2.0, gamma=0.7, sft_weight=0.3),
        lambda a: -torch.log(sigmoid(2.0 * a.pi_w / a.n_w - 2.0 * a.pi_l / a.n_l - 0.7)) - 0.3 * a.pi_w / a.n_w,
    ),
    "cpo": (
        Cpo(beta=0.2, sft_weight=0.5),
        lambda a: -torch.log(sigmoid(0.2 * (a.pi_w - a.pi_l))) - 0.5 * a.pi_w / a.n_w,
    ),
    "cpo hinge": (
        Cpo(beta=0.2, loss="hinge", sft_weight=0.0),
        lambda a: torch.clamp(1 - 0.2 * (a.pi_w - a.pi_l), min=0),
    ),
    "cpo ipo": (
        Cpo(beta=0.2, loss="ipo", sft_weight=0.0),
        lambda a: (a.pi_w / a.n_w - a.pi_l / a.n_l - 1 / 0.4) ** 2,
    ),
}


@pytest.mark.parametrize("layout", ["packed", "shared", "padded"])
@pytest.mark.parametrize("tokens", [30, 10_000])
@pytest.mark.parametrize("name", PAPERS)
def test_a_loss_over_pairs_and_its_gradient_are_those_of_its_paper(name: str, tokens: int, layout: str) -> None:
    method, paper = PAPERS[name]
    policy, reference, store = known_model(1.0), known_model(2.0), pair_store()
    expected = torch.stack([paper(Answers(policy, reference, pair)) for pair in store.groups]).mean()
    expected.backward()
    expected_gradients = gradients(policy)

    result = measure(
        build_preference(method, OtherModel(reference)), policy, StoreRows(store), tokens=tokens, layout=layout
    )

    assert result.num_micro_batches == (1 if tokens > 1000 else len(store.groups))
    assert result.normaliser == len(store.groups)
    assert result.loss == pytest.approx(expected.item(), rel=RTOL)
    for parameter, gradient in gradients(policy).items():
        torch.testing.assert_close(gradient, expected_gradients[parameter], rtol=RTOL, atol=ATOL, msg=parameter)


def test_dpo_reports_rewards_margins_accuracies_and_log_probabilities_as_means_over_all_pairs() -> None:
    policy, reference, store = known_model(1.0), known_model(2.0), pair_store()
    result = measure(DpoObjective(Dpo(beta=0.3), OtherModel(reference)), policy, StoreRows(store), tokens=40)
    pairs = [Answers(policy, reference, pair) for pair in store.groups]
    chosen = torch.stack([0.3 * (a.pi_w - a.ref_w) for a in pairs]).detach()
    rejected = torch.stack([0.3 * (a.pi_l - a.ref_l) for a in pairs]).detach()
    expected = {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).double().mean(),
        "logps/chosen": torch.stack([a.pi_w.detach() for a in pairs]).mean(),
        "logps/rejected": torch.stack([a.pi_l.detach() for a in pairs]).mean(),
    }
    assert 0 < float(expected["rewards/accuracies"]) < 1
    got = {name: total / count for name, (total, count) in result.metrics.items()}
    assert got == {name: pytest.approx(float(value), rel=RTOL, abs=1e-6) for name, value in expected.items()}


@pytest.mark.parametrize("layout", ["packed", "shared", "padded"])
@pytest.mark.parametrize("tokens", [20, 10_000])
@pytest.mark.parametrize("drift", ["towards the other answers", "away from them"])
def test_kto_and_its_reference_point_are_those_of_the_paper(drift: str, tokens: int, layout: str) -> None:
    method = Kto(beta=0.3, desirable_weight=1.2, undesirable_weight=0.7)
    policy, reference = known_model(1.0), known_model(2.0)
    if drift == "away from them":
        policy, reference = reference, policy
    rows = MismatchedRows(label_store(), seed=0)  # type: ignore[arg-type]
    others = [rows.row(index).statistics_documents[0] for index in range(len(rows))]
    ratios = [logprobs_of(policy, d).sum().detach() - logprobs_of(reference, d).sum().detach() for d in others]
    divergence = torch.clamp(torch.stack(ratios).mean(), min=0)
    losses, good_rewards = [], []
    for index in range(len(rows)):
        (document,) = rows.row(index).documents
        reward = 0.3 * (logprobs_of(policy, document).sum() - logprobs_of(reference, document).sum().detach())
        good = document.role.name == "DESIRABLE"
        if good:
            good_rewards.append(reward.detach())
        value = sigmoid(reward - 0.3 * divergence) if good else sigmoid(0.3 * divergence - reward)
        losses.append((1.2 if good else 0.7) * (1 - value))
    expected = torch.stack(losses).mean()
    expected.backward()
    expected_gradients = gradients(policy)

    result = measure(build_preference(method, OtherModel(reference)), policy, rows, tokens=tokens, layout=layout)

    assert (float(divergence) > 0) == (result.metrics["kl"][0] > 0)
    assert result.metrics["kl"][0] / result.metrics["kl"][1] == pytest.approx(float(divergence), rel=RTOL, abs=1e-6)
    assert result.loss == pytest.approx(expected.item(), rel=RTOL)
    total, count = result.metrics["rewards/chosen"]
    assert (total / count, count) == (
        pytest.approx(float(torch.stack(good_rewards).mean()), rel=RTOL),
        len(good_rewards),
    )
    for parameter, gradient in gradients(policy).items():
        torch.testing.assert_close(gradient, expected_gradients[parameter], rtol=RTOL, atol=ATOL, msg=parameter)


def test_a_mismatched_answer_keeps_the_prompt_and_belongs_to_another_one() -> None:
    store = label_store()
    rows = MismatchedRows(store, seed=3)  # type: ignore[arg-type]
    used = set()
    for index, (own,) in enumerate(store.groups):
        (other,) = rows.row(index).statistics_documents
        prompt = int(own.loss_mask.argmax())
        assert other.ids[:prompt].tolist() == own.ids[:prompt].tolist()
        answer = tuple(other.ids[prompt:].tolist())
        sources = [
            number
            for number, (d,) in enumerate(store.groups)
            if tuple(d.ids[int(d.loss_mask.argmax()) :].tolist())[: len(answer)] == answer
        ]
        assert sources != [index]
        used.update(sources)
        assert other.loss_mask.tolist() == [0] * prompt + [1] * len(answer)
        assert len(other.ids) <= store.lengths.max()
    assert len(used) == len(store.groups)


def test_the_odds_of_near_certain_and_hopeless_answers_stay_finite() -> None:
    from gym_trainer.objectives.reference_free import _log1mexp

    x = torch.tensor([-1e-300, -1e-12, -0.5, -0.7, -30.0, -800.0, 0.0], dtype=torch.float64, requires_grad=True)
    values = _log1mexp(x)
    import math

    expected = [math.log(-math.expm1(v)) if v < 0 else None for v in x.tolist()]
    for got, want in zip(values.tolist()[:6], expected[:6], strict=True):
        assert got == pytest.approx(want, rel=1e-12)
    values.sum().backward()
    assert torch.isfinite(values).all()
    assert x.grad is not None
    assert torch.isfinite(x.grad[1:6]).all()


class TestReference:
    """Three ways to the same reference."""

    @staticmethod
    def _trained(model: Any) -> Any:
        """As after some steps: adapter weights that are no longer what they were."""
        fill(model, 5.0, 0.1)
        return model

    @staticmethod
    def _lora() -> Any:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        return get_peft_model(known_model(1.0), LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear")).double()

    @pytest.mark.parametrize("kind", ["dpo", "kto"])
    def test_adapter_disabled_frozen_copy_and_precomputed_agree(self, kind: str, tmp_path: Any) -> None:
        from gym_trainer.objectives.reference import AdapterDisabled, FrozenCopy, Precomputed

        store = pair_store() if kind == "dpo" else label_store()
        results, slopes = [], []
        for reference in (AdapterDisabled(), FrozenCopy(), Precomputed(), OtherModel(known_model(1.0))):
            model = self._lora()
            objective = build_preference(Dpo(beta=0.3) if kind == "dpo" else Kto(beta=0.3), reference)
            (rows,) = objective.start(start_of(objective, model, tmp_path), [objective.rows(store)])  # type: ignore[arg-type]
            self._trained(model)
            results.append(measure(objective, model.eval(), rows, tokens=60))  # type: ignore[arg-type]
            slopes.append(gradients(model))
        expected = results.pop()
        for result, slope in zip(results, slopes, strict=False):
            assert result.loss == pytest.approx(expected.loss, rel=1e-6)
            assert result.metrics == {
                name: (pytest.approx(total, rel=1e-5, abs=1e-5), count)
                for name, (total, count) in expected.metrics.items()
            }
            for name, gradient in slope.items():
                torch.testing.assert_close(gradient, slopes[-1][name], rtol=1e-5, atol=1e-8)
        assert [path.name for path in (tmp_path / "data").iterdir()] == ["reference-train.npy"]

    def test_a_frozen_copy_is_of_the_starting_adapter_and_leaves_the_policy_in_place(self, tmp_path: Any) -> None:
        from gym_trainer.objectives.reference import FrozenCopy

        model = self._trained(self._lora()).train()
        objective = DpoObjective(Dpo(), FrozenCopy())
        rows = objective.start(start_of(objective, model, tmp_path), [StoreRows(pair_store())])[0]  # type: ignore[arg-type]
        model.eval()
        result = measure(objective, model, rows)  # type: ignore[arg-type]
        assert result.metrics["rewards/margins"][0] == 0
        assert result.loss == pytest.approx(0.6931471805599453, rel=1e-9)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        fill(model, 6.0, 0.1)
        moved = {name: p.detach().clone() for name, p in model.named_parameters()}
        assert measure(objective, model, rows).metrics["rewards/margins"][0] != 0  # type: ignore[arg-type]
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, moved[name])
        assert any(not torch.equal(before[name], moved[name]) for name in before)

    @pytest.mark.parametrize("kind", ["disabled", "copy"])
    def test_a_reference_is_the_same_one_under_fused_layers(self, kind: str, tmp_path: Any) -> None:
        from peft import LoraConfig, get_peft_model

        from gym_trainer.fast.attention import PER_DOCUMENT, attention_of
        from gym_trainer.fast.fused.apply import fused_layers
        from gym_trainer.objectives.reference import AdapterDisabled, FrozenCopy

        results = []
        for fused in (False, True):
            model = get_peft_model(known_model(1.0), LoraConfig(r=4, target_modules="all-linear")).double().train()
            objective = build_preference(Dpo(beta=0.3), AdapterDisabled() if kind == "disabled" else FrozenCopy())
            with ExitStack() as stack:
                stack.enter_context(attention_of(model.get_base_model(), PER_DOCUMENT))
                if fused:
                    stack.enter_context(fused_layers(model))
                rows = objective.start(start_of(objective, model, tmp_path), [StoreRows(pair_store())])[0]  # type: ignore[arg-type]
                self._trained(model)
                results.append((measure(objective, model, rows, tokens=60), gradients(model)))  # type: ignore[arg-type]
        (plain, slopes), (under, fused_slopes) = results
        assert abs(plain.metrics["rewards/margins"][0]) > 1e-3
        assert under.loss == pytest.approx(plain.loss, rel=1e-6)
        assert under.metrics["rewards/margins"][0] == pytest.approx(plain.metrics["rewards/margins"][0], abs=1e-5)
        for name, gradient in fused_slopes.items():
            torch.testing.assert_close(gradient, slopes[name], rtol=1e-4, atol=1e-7, msg=name)

    def test_a_reference_has_no_dropout_whatever_the_policy_has(self, tmp_path: Any) -> None:
        from gym_trainer.loop.forward import ForwardModel
        from gym_trainer.objectives.logprobs import answer_sums
        from gym_trainer.objectives.reference import FrozenCopy

        model = self._trained(self._lora()).train()
        reference = FrozenCopy()
        objective = DpoObjective(Dpo(), reference)
        start = start_of(objective, model, tmp_path)
        rows = objective.start(start, [StoreRows(pair_store())])[0]  # type: ignore[arg-type]
        seen: list[Any] = []
        start.runner.for_each((rows.row(i) for i in range(len(rows))), seen.append)

        def sums(forward: ForwardModel, batch: Any) -> Tensor:
            return answer_sums(forward.logprobs(batch), batch)

        first, again = (reference.logprobs(start.model, seen[0], sums) for _ in range(2))
        assert torch.equal(first, again)
        assert model.training
        assert not torch.equal(sums(start.model, seen[0]), sums(start.model, seen[0]))
