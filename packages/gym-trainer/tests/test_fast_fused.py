"""Guards: fused layers give the plain model's loss and gradients, kept or recomputed, and leave the model as it was."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gym_trainer.fast.attention import PER_DOCUMENT, attention_of
from gym_trainer.fast.fused.apply import LayersDiffer, fused_layers, why_not_fused
from gym_trainer.fast.head import split
from gym_trainer.fast.layers import decoder_layers
from gym_trainer.fast.loss import linear_cross_entropy
from gym_trainer.fast.packing import PackedLayout

SMALL = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(sliding_window=6, **SMALL)),
}
LENGTHS = (13, 1, 20)


def _model(make, dtype=torch.float64, **options):
    torch.manual_seed(0)
    options = {"target_modules": "all-linear", "r": 4, "lora_alpha": 6} | options
    causal = make().to(dtype)
    for name, parameter in causal.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model = get_peft_model(causal, LoraConfig(init_lora_weights=False, **options)).train()
    return model.to(dtype)


def _loss_and_gradients(model):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 128, (1, sum(LENGTHS)), generator=generator)
    labels = torch.roll(ids[0], -1)
    labels[torch.tensor(LENGTHS).cumsum(0) - 1] = -100
    layout = PackedLayout.from_lengths(LENGTHS)
    model.zero_grad()
    body, head = split(model)
    hidden = body(input_ids=ids, use_cache=False, **layout.model_kwargs()).last_hidden_state[0]
    loss = linear_cross_entropy(hidden, head, labels).loss_sum
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


@pytest.fixture
def poisoned():
    """Memory that was not written reads as NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("num_recomputed", "offload"), [(0, False), (2, False), (3, False), (2, True)])
def test_fused_layers_equal_the_models_own_in_float64(name, num_recomputed, offload):
    model = _model(MODELS[name])
    causal = model.get_base_model()
    before = {n: (p.detach().clone(), p.is_contiguous()) for n, p in model.named_parameters()}
    with attention_of(causal, PER_DOCUMENT):
        expected = _loss_and_gradients(model)
        with fused_layers(model, num_recomputed, offload=offload):
            got = _loss_and_gradients(model)
            again = _loss_and_gradients(model)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")
        assert torch.equal(again[key], got[key])
    for key, parameter in model.named_parameters():
        value, contiguous = before[key]
        assert torch.equal(parameter, value)
        assert parameter.is_contiguous() == contiguous
    assert not any("forward" in layer.__dict__ for layer in decoder_layers(model))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["down_proj"], ["k_proj", "o_proj", "up_proj"]])
def test_layers_with_lora_on_some_projections_are_fused_too(targets):
    model = _model(MODELS["qwen3"], target_modules=targets, r=3, use_rslora=True)
    with attention_of(model.get_base_model(), PER_DOCUMENT):
        expected = _loss_and_gradients(model)
        with fused_layers(model, 1):
            got = _loss_and_gradients(model)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-5)


def test_a_step_of_the_optimizer_is_seen_by_the_next_forward():
    model = _model(MODELS["llama"], torch.float32)
    plain = copy.deepcopy(model)
    losses = []
    for each, context in ((plain, None), (model, fused_layers(model))):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2)
        with attention_of(each.get_base_model(), PER_DOCUMENT):
            if context is not None:
                context.__enter__()
            for _ in range(3):
                result = _loss_and_gradients(each)
                optimizer.step()
            if context is not None:
                context.__exit__(None, None, None)
        losses.append(result["loss"])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)


def test_evaluation_generation_and_a_switched_off_adapter_give_the_models_own_numbers():
    model = _model(MODELS["qwen3"], torch.float32)
    ids = torch.arange(5, 25)[None]
    with model.disable_adapter(), torch.no_grad():
        base = model(input_ids=ids).logits
    model.eval()
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        generated = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    model.train()
    with fused_layers(model):
        with model.disable_adapter(), torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids).logits, base)
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids).logits, adapted)
            assert torch.equal(model.generate(input_ids=ids, max_new_tokens=5, do_sample=False), generated)
        model.train()


def test_an_untrained_policy_is_its_reference_to_the_bit_and_evaluation_keeps_nothing():
    model = _model(MODELS["qwen3"], torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    ids = torch.arange(5, 35)[None]
    layout = PackedLayout.from_lengths((18, 12))
    body, _ = split(model)

    def hidden():
        return body(input_ids=ids, use_cache=False, **layout.model_kwargs()).last_hidden_state

    with attention_of(model.get_base_model(), PER_DOCUMENT), fused_layers(model, 1):
        policy = hidden()
        with torch.no_grad(), model.disable_adapter():
            reference = hidden()
        with torch.no_grad():
            evaluated = hidden()
        with model.disable_adapter():
            own = hidden()
    assert torch.equal(policy, reference)
    assert torch.equal(policy, evaluated)
    assert not reference.requires_grad
    torch.testing.assert_close(own, policy, rtol=1e-4, atol=1e-4)
    assert not torch.equal(own, policy)  # gradients without the adapter are the layers' own


def test_padded_rows_are_served_with_their_mask():
    model = _model(MODELS["llama"])
    ids = torch.arange(5, 35).reshape(2, 15)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0

    def run():
        model.zero_grad()
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]

    expected = run()
    with fused_layers(model, 1):
        for got, want in zip(run(), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL)), {}, "not attention and MLP behind one norm each"),
        (MODELS["llama"], {"lora_dropout": 0.1}, "dropout"),
        (MODELS["llama"], {"use_dora": True}, "dora"),
        (lambda: LlamaForCausalLM(LlamaConfig(hidden_act="gelu", **SMALL)), {}, "not SwiGLU"),
    ],
    ids=["gemma2", "dropout", "dora", "gelu"],
)
def test_what_cannot_be_fused_says_why(make, options, reason):
    model = _model(make, torch.float32, **options)
    assert reason in (why_not_fused(model) or "")
    with pytest.raises(LayersDiffer, match=reason), fused_layers(model):
        pass


def test_layers_that_look_alike_and_compute_something_else_are_found_out():
    granite = GraniteConfig(residual_multiplier=0.5, **SMALL)
    model = _model(lambda: GraniteForCausalLM(granite), torch.float32)
    assert why_not_fused(model) is None
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    packed = attention_of(model.get_base_model(), PER_DOCUMENT)
    with packed, pytest.raises(LayersDiffer, match="differs by"), fused_layers(model):
        pass
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    assert not any("forward" in layer.__dict__ for layer in decoder_layers(model))


def test_the_weights_are_never_there_twice():
    model = _model(MODELS["llama"], torch.float32)
    with fused_layers(model):
        fused = [layer.__dict__["forward"].__self__ for layer in decoder_layers(model)]
        matrices = [weakref.ref(joined.matrix) for layer in fused for joined in layer.joined]
        assert all(matrix() is not None for matrix in matrices)
        weight = decoder_layers(model)[0].mlp.down_proj.get_base_layer().weight
        assert weight.untyped_storage().data_ptr() == fused[0].down.matrix.untyped_storage().data_ptr()
    assert all(matrix() is None for matrix in matrices)


def test_a_second_backward_pass_is_refused():
    model = _model(MODELS["llama"], torch.float32)
    ids = torch.arange(5, 25)[None]
    with fused_layers(model):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="runs once"):
            loss.backward()


def test_the_kernels_equal_the_plain_operations_in_tritons_interpreter():
    pytest.importorskip("triton")
    script = Path(__file__).parent / "fused_kernels_interpreted.py"
    done = subprocess.run(
        [sys.executable, str(script)], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [
        "rms_norm",
        "add_rms_norm",
        "rms_norm_backward",
        "rotate",
        "rotate_backward",
        "swiglu",
        "swiglu_backward",
        "project",
        "reduce_rows",
        "collect",
        "scatter",
    ]
