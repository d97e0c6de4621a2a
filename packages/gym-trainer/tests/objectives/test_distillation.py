"""Guards distillation: the chunked divergence and its gradient equal the definitions in float64, and TRL's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from known import GroupStore, fingerprint, gradients, known_model, measure, pair_store
from tiny_rows import tiny_model
from torch import Tensor

from gym_sdk.spec import Distillation
from gym_trainer.fast import divergence as fast_divergence
from gym_trainer.loop.batch import StepBatch, StoreRows
from gym_trainer.loop.dataset import StepDataset
from gym_trainer.loop.forward import ForwardModel
from gym_trainer.loop.step import StepResult
from gym_trainer.objectives.distillation import DistillationObjective, Teacher
from gym_trainer.objectives.on_policy import with_own_answers

TRL = json.loads(Path(__file__).with_name("trl.json").read_text())["distillation"]
TEMPERATURE, BETA = 1.7, 0.3


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum(-1)


def jsd(teacher: Tensor, student: Tensor) -> Tensor:
    middle = BETA * teacher + (1 - BETA) * student
    return BETA * kl(teacher, middle) + (1 - BETA) * kl(student, middle)


DEFINITIONS = {
    "forward_kl": lambda teacher, student: kl(teacher, student),
    "reverse_kl": lambda teacher, student: kl(student, teacher),
    "jsd": jsd,
}


def rows() -> GroupStore:
    return GroupStore([(chosen,) for chosen, _ in pair_store().groups])


def distil(kind: str, student: torch.nn.Module, *, tokens: int = 10_000, sft_weight: float = 0.0) -> StepResult:
    method = Distillation(
        teacher="./t",
        divergence=kind,  # type: ignore[arg-type]
        beta=BETA,
        temperature=TEMPERATURE,
        sft_weight=sft_weight,
    )
    objective = DistillationObjective(method, teacher=None)  # type: ignore[arg-type]
    objective._teacher = ForwardModel(known_model(2.0))
    return measure(objective, student, StoreRows(rows()), tokens=tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [20, 10_000])
@pytest.mark.parametrize("kind", DEFINITIONS)
def test_a_divergence_and_its_gradient_are_those_of_its_definition(
    kind: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher = known_model(1.0), known_model(2.0)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for (document,) in rows().groups:
        ids = torch.tensor(document.ids.astype(np.int64))[None]
        trained = torch.tensor(document.loss_mask[1:] != 0)
        own, other = (
            torch.softmax(model(input_ids=ids).logits[0, :-1][trained] / TEMPERATURE, -1)
            for model in (student, teacher)
        )
        nll = -torch.log_softmax(student(input_ids=ids).logits[0, :-1][trained], -1).gather(
            1, ids[0, 1:][trained, None]
        )
        total = total + (DEFINITIONS[kind](other.detach(), own)).sum() + 0.25 * nll.sum()
        count += int(trained.sum())
    (total / count).backward()
    expected = gradients(student)

    monkeypatch.setattr(DistillationObjective, "_chunk_size", staticmethod(lambda model: 5))
    result = distil(kind, student, tokens=tokens, sft_weight=0.25)

    assert result.normaliser == count
    assert result.loss == pytest.approx(float(total) / count, rel=1e-5)
    for name, gradient in gradients(student).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_a_divergence_is_trls(kind: str) -> None:
    student = known_model(1.0)
    assert distil(kind, student).loss == pytest.approx(TRL[kind]["loss"], rel=1e-5)
    assert fingerprint(student) == pytest.approx(TRL[kind]["gradient"], rel=1e-4)


def test_a_student_that_is_its_teacher_has_nothing_to_learn() -> None:
    for kind in DEFINITIONS:
        student = known_model(2.0)
        assert distil(kind, student).loss == pytest.approx(0, abs=1e-6)
        assert fingerprint(student)[0] < 1e-4


class TestOwnAnswers:
    """A share of the rows answered by the student."""

    def step(self, share: float, *, model: Any = None, epoch: int = 0) -> tuple[StepBatch, StepBatch]:
        given = replace(StepDataset(StoreRows(rows()), batch_size=6, seed=0)[0], epoch=epoch)  # type: ignore[arg-type]
        written = with_own_answers(model or tiny_model(), given, share=share, max_tokens=5, stop_ids=(3,), seed=1)
        return given, written

    def test_prompts_stay_answers_are_drawn_again_and_the_same_ones_are_drawn_twice(self) -> None:
        given, written = self.step(1.0)
        for before, after in zip(given.rows, written.rows, strict=True):
            prompt = int(before.documents[0].loss_mask.argmax())
            (document,) = after.documents
            assert document.ids[:prompt].tolist() == before.documents[0].ids[:prompt].tolist()
            assert document.loss_mask.tolist() == [0] * prompt + [1] * (len(document.ids) - prompt)
            assert 1 <= len(document.ids) - prompt <= 5
            assert 3 not in document.ids[prompt:-1]
            assert after.written_by_model
        again = self.step(1.0)[1]
        other = self.step(1.0, epoch=1)[1]
        answers = [[row.documents[0].ids.tolist() for row in step.rows] for step in (written, again, other)]
        assert answers[0] == answers[1] != answers[2]

    def test_a_share_of_the_rows_is_chosen_and_the_model_is_given_back(self) -> None:
        model = tiny_model().train()
        attention = model.config._attn_implementation
        given, written = self.step(0.5, model=model)
        own = [row.written_by_model for row in written.rows]
        assert 0 < sum(own) < 6
        assert all(a is b for a, b, new in zip(given.rows, written.rows, own, strict=True) if not new)
        assert (model.training, model.config._attn_implementation) == (True, attention)
        assert not any(row.written_by_model for row in self.step(0.0, model=model)[1].rows)

    def test_what_the_student_wrote_is_no_example_to_imitate(self) -> None:
        student = tiny_model(seed=4)
        method = Distillation(teacher="./t", on_policy_share=0.5, on_policy_max_tokens=4, sft_weight=1.0)
        objective = DistillationObjective(method, teacher=None, stop_ids=(3,), seed=1)  # type: ignore[arg-type]
        objective._teacher = ForwardModel(tiny_model(seed=5))
        result = measure(objective, student, StoreRows(rows()))  # type: ignore[arg-type]
        _, written = self.step(0.5, model=student)
        examples = sum(row.num_trained_tokens for row in written.rows if not row.written_by_model)
        assert result.metrics["nll"][1] == examples
        assert result.metrics["divergence"][1] == result.normaliser > examples
        expected = (result.metrics["divergence"][0] + result.metrics["nll"][0]) / result.normaliser
        assert result.loss == pytest.approx(expected, rel=1e-6)


def test_a_teachers_memory_is_known_from_its_configuration_before_it_is_loaded(tmp_path: Path) -> None:
    model = tiny_model()
    model.config.save_pretrained(tmp_path)
    sizes = {}
    for quantization, dtype in (("none", "float32"), ("none", "bfloat16"), ("int8", "bfloat16")):
        teacher = Teacher(
            resolved=SimpleNamespace(folder=tmp_path),  # type: ignore[arg-type]
            quantization=quantization,  # type: ignore[arg-type]
            trust_remote_code=False,
        )
        sizes[quantization, dtype] = teacher.resident_bytes(dtype)
    count = sum(parameter.numel() for parameter in model.parameters())
    in_layers = sum(p.numel() for name, p in model.named_parameters() if "_proj" in name)
    assert sizes == {
        ("none", "float32"): 4 * count,
        ("none", "bfloat16"): 2 * count,
        ("int8", "bfloat16"): 2 * count - in_layers,
    }


def test_chunks_bound_the_logits_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = fast_divergence.divergence
    monkeypatch.setattr(fast_divergence, "divergence", lambda own, *rest: seen.append(len(own)) or original(own, *rest))
    monkeypatch.setattr(DistillationObjective, "_chunk_size", staticmethod(lambda model: 4))
    result = distil("forward_kl", known_model(1.0))
    assert max(seen) == 4
    assert sum(seen) == 2 * result.normaliser  # once more in the backward pass


def test_padded_vocabularies_are_compared_where_both_have_tokens() -> None:
    own, other = torch.randn(6, 40, dtype=torch.float64), torch.randn(6, 48, dtype=torch.float64)
    compared = fast_divergence.compare(
        lambda chunk: own[chunk], lambda chunk: other[chunk], torch.arange(6), kind="forward_kl", chunk_size=3
    )
    expected = kl(torch.softmax(other[:, :40], -1), torch.softmax(own, -1)).sum()
    assert float(compared.divergence_sum) == pytest.approx(float(expected), rel=1e-6)
