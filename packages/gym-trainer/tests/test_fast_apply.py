"""Guards: every transform of the fast path gives the same loss and gradients, and is gone afterwards."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear
from transformers import LlamaConfig, LlamaForCausalLM

from gym_trainer.bench.train import BenchSettings, bench_train, render
from gym_trainer.cli.bench import parse_documents
from gym_trainer.fast.apply import FastPath, applied
from gym_trainer.fast.lora import LeanLoraLinear, lean_lora, lora_layers, why_not_lean

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)


def _peft_model(**options):
    torch.manual_seed(0)
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, **options)
    return get_peft_model(LlamaForCausalLM(CONFIG), adapter).train()


def _loss_and_gradients(model):
    ids = torch.arange(5, 29)[None]
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def _assert_same(got, expected):
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-6)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-3, atol=1e-5)


def test_lean_lora_equals_pefts_and_leaves_its_classes():
    model = _peft_model()
    expected = _loss_and_gradients(model)
    with applied(model, FastPath()):
        assert all(type(layer) is LeanLoraLinear for layer in lora_layers(model))
        _assert_same(_loss_and_gradients(model), expected)
        with model.disable_adapter(), torch.no_grad():
            without = model(input_ids=torch.arange(5, 29)[None]).logits
    assert all(type(layer) is Linear for layer in lora_layers(model))
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(input_ids=torch.arange(5, 29)[None]).logits, without)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("input_needs_gradient", [True, False])
def test_the_added_product_is_the_sum_and_has_its_gradients(bias, input_needs_gradient):
    torch.manual_seed(0)
    layer = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(6, 5, bias=bias)),
        LoraConfig(r=2, lora_alpha=6, target_modules=["0"], init_lora_weights=False),
    )
    (product,) = lora_layers(layer.double())
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=input_needs_gradient)
    trained = [p for p in product.parameters() if p.requires_grad]
    expected = product(x)
    with lean_lora(layer):
        got = product(x)
        (inner, _), *_ = got.grad_fn.next_functions  # beyond the view in the input's shape
        assert type(inner).__name__ == "_AddedProductBackward"
        assert torch.autograd.gradcheck(lambda *_: product(x), [*([x] if input_needs_gradient else []), *trained])
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_what_a_lean_layer_gives_may_be_changed_in_place():
    """As Llama 4 scales its queries."""
    torch.manual_seed(0)
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 5)), LoraConfig(r=2, target_modules=["0"]))
    x_BLI = torch.randn(2, 3, 6)
    expected = (model(x_BLI) * 3).square().sum()
    with lean_lora(model):
        out = model(x_BLI)
        out *= 3
        out.square().sum().backward()
    torch.testing.assert_close(out.square().sum(), expected)
    assert all(bool(p.grad.isfinite().all()) for name, p in model.named_parameters() if "lora_" in name)


@pytest.mark.parametrize(("options", "reason"), [({"lora_dropout": 0.1}, "dropout"), ({"use_dora": True}, "dora")])
def test_what_lean_lora_cannot_do_is_left_to_peft(options, reason):
    model = _peft_model(**options)
    assert all(reason in why_not_lean(layer) for layer in lora_layers(model))
    with applied(model, FastPath()):
        assert not any(type(layer) is LeanLoraLinear for layer in lora_layers(model))


@pytest.mark.slow
def test_compiled_layers_equal_eager_ones_whether_kept_or_recomputed():
    model = _peft_model()
    expected = _loss_and_gradients(model)
    for num_recomputed in (0, 2):
        with applied(model, FastPath(compile=True, recompute_layers=num_recomputed)):
            _assert_same(_loss_and_gradients(model), expected)
    assert not any("forward" in layer.__dict__ for layer in model.get_base_model().model.layers)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a CUDA device the bench measures other rows")
def test_the_bench_measures_every_way_to_the_same_first_loss():
    settings = BenchSettings(rank=4, lengths=(20, 9, 30), num_steps=1, num_warm_steps=0, compile=False)
    settings = dataclasses.replace(settings, prompts=(5, 0, 10), price_per_hour=1.0)
    report = bench_train(CONFIG, settings)
    assert not report.failures
    assert [row.name for row in report.rows] == [
        "transformers + peft, padded",
        "gym: packed, chunked loss",
        "gym: + lean LoRA products",
        "gym train, as planned",
    ]
    assert [row.trained_tokens_per_s for row in report.rows] == [
        pytest.approx(44 / 59 * row.throughput_tokens_per_s) for row in report.rows
    ]
    assert report.rows[0].cost_per_1000_tokens == pytest.approx(1 / 3.6 / report.rows[0].throughput_tokens_per_s)
    assert all(row.throughput_tokens_per_s > 0 for row in report.rows)
    # an optimizer step lies between two rows, too small to move the loss of random weights by a hundredth
    for row in report.rows:
        assert row.loss == pytest.approx(report.rows[0].loss, abs=0.05)
    assert "tokens/s" in render(report)


def test_lengths_are_read():
    assert parse_documents("2048x4") == ((2048,) * 4, (0,) * 4)
    assert parse_documents("100,250,60") == ((100, 250, 60), (0, 0, 0))
    assert parse_documents("60+40,30+9x2") == ((100, 39, 39), (60, 30, 30))
