"""Guards packed linear layers: the same products, left alone where they do not pay, and gone when the engine is."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import greedy_reference, prompts, tiny_model
from torch import nn

from gym_serve.engines.base import GenerationRequest, SamplingParams, generate_all
from gym_serve.engines.packed import LEAST_ROWS, PackedLinears
from gym_serve.engines.transformers import TransformersEngine

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
PLENTY = 2**40


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", list(LEAST_ROWS), ids=str)
def test_a_packed_layer_gives_the_same_product(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(96, 160, bias=bias).to(dtype)
    rows = torch.randn(3, 7, 96).to(dtype)
    exact = torch.nn.functional.linear(rows.double(), layer.weight.double(), layer.bias.double() if bias else None)
    with torch.inference_mode():
        plain = layer(rows)
        packed = PackedLinears(layer, free_bytes=PLENTY)
        assert packed.num_layers == 1
        product = layer(rows)
        assert product.shape == plain.shape
        # No further from the exact product than PyTorch's own.
        assert (product - exact).abs().max() <= 2 * (plain - exact).abs().max()
        one = layer(rows[:1, :1])
        packed.remove()
    assert torch.equal(one, layer(rows[:1, :1]).detach()), "a single row is multiplied as before"
    assert "forward" not in layer.__dict__


def test_memory_decides() -> None:
    layer = nn.Linear(64, 64)
    assert PackedLinears(layer, free_bytes=64 * 64 * 4).num_layers == 0
    assert "forward" not in layer.__dict__


def test_an_engine_with_packed_weights_says_what_generate_says() -> None:
    batch = prompts(8, seed=4)
    expected = [greedy_reference(tiny_model(), prompt, 16) for prompt in batch]
    model = tiny_model()
    with TransformersEngine(model, max_slots=8, pack_weights=True) as engine:
        requests = [
            GenerationRequest(prompt_ids=prompt, max_tokens=16, sampling=SamplingParams(temperature=0.0))
            for prompt in batch
        ]
        assert [done.token_ids for done in generate_all(engine, requests)] == expected
    assert not any("forward" in module.__dict__ for module in model.modules() if type(module) is nn.Linear)
    assert greedy_reference(model, batch[0], 16) == expected[0]


def test_layers_below_a_peft_adapter_are_packed_too() -> None:
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    prompt = prompts(1, seed=5)[0]
    expected = greedy_reference(model, prompt, 12)
    with TransformersEngine(model, max_slots=4, pack_weights=True) as engine:
        request = GenerationRequest(prompt_ids=prompt, max_tokens=12, sampling=SamplingParams(temperature=0.0))
        assert [done.token_ids for done in generate_all(engine, [request])] == [expected]
