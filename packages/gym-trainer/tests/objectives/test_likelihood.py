"""Guards DFT and NEFTune: loss and gradient by the papers' formulas, and noise of the right size in the right place."""

from __future__ import annotations

import pytest
import torch
from known import CPU, GroupStore, gradients, known_model, logprobs_of, measure, pair_store

from gym_trainer.loop.batch import StoreRows, make_micro_batch
from gym_trainer.loop.forward import ForwardModel
from gym_trainer.objectives.neftune import noisy_embeddings
from gym_trainer.objectives.sft import SftObjective


def rows() -> StoreRows:
    return StoreRows(GroupStore([(chosen,) for chosen, _ in pair_store().groups]))  # type: ignore[arg-type]


def test_dft_has_the_gradient_of_minus_the_probability() -> None:
    model, source = known_model(1.0), rows()
    tokens = [logprobs_of(model, source.row(index).documents[0]) for index in range(len(source))]
    logprobs = torch.cat(tokens)
    (-logprobs.exp()).mean().backward()
    expected = gradients(model)
    result = measure(SftObjective(loss_kind="dft"), model, source, tokens=20)
    assert result.loss == pytest.approx(float((-logprobs.exp() * logprobs).mean()), rel=1e-6)
    nll, count = result.metrics["nll"]
    assert nll / count == pytest.approx(float(-logprobs.mean()), rel=1e-6)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-8, msg=name)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_neftune_noise_is_bounded_by_each_documents_own_length_and_gone_afterwards(layout: str) -> None:
    model, source = known_model(1.0), rows()
    batch = make_micro_batch([source.row(index) for index in range(len(source))], layout=layout, device=CPU)  # type: ignore[arg-type]
    embed = model.get_input_embeddings()
    plain = embed(batch.input_ids)
    with noisy_embeddings(ForwardModel(model), batch, 5.0):
        noise = (embed(batch.input_ids) - plain).flatten(0, 1)
    assert torch.equal(embed(batch.input_ids), plain)
    for number, row in enumerate(batch.rows):
        length = len(row.documents[0].ids)
        own = noise[batch.document_ids_T == number].abs()
        bound = 5.0 / (length * 16) ** 0.5
        assert own.shape == (length, 16)
        assert 0.8 * bound < float(own.max()) <= bound * (1 + 1e-6)
        assert float(own.mean()) == pytest.approx(bound / 2, rel=0.25)


def test_evaluation_is_without_noise() -> None:
    model, source = known_model(1.0), rows()
    objective = SftObjective(neftune_alpha=50.0)
    noisy = measure(objective, model, source).loss
    batch = make_micro_batch([source.row(index) for index in range(len(source))], layout="packed", device=CPU)
    with torch.no_grad():
        clean = objective.loss(ForwardModel(model), batch, {}).loss.item()
        assert objective.loss(ForwardModel(model), batch, {}).loss.item() == clean
    expected = measure(SftObjective(), model, source)
    assert clean / expected.normaliser == pytest.approx(expected.loss, rel=1e-6)
    assert noisy != pytest.approx(expected.loss, rel=1e-3)
