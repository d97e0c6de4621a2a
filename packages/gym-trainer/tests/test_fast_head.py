"""Guards: the body and the head taken apart give the model's own loss and gradients, or the model is refused."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    ModernBertDecoderConfig,
    PhiConfig,
)

from gym_trainer.fast.head import HeadNotLinear, split
from gym_trainer.fast.loss import linear_cross_entropy

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "soft-capped (gemma2)": Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=2.0),
    "multiplied (cohere)": CohereConfig(**SMALL, logit_scale=0.25),
    "divided (granite)": GraniteConfig(**SMALL, logits_scaling=4.0),
    "bias (phi)": PhiConfig(**SMALL),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_equal_the_whole_model(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").train()
    ids_1T = torch.randint(3, 97, (1, 20))
    labels_T = torch.cat([ids_1T[0, 1:], torch.tensor([-100])])
    expected = cross_entropy(model(ids_1T, use_cache=False).logits[0].float(), labels_T, reduction="sum")
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()

    body, head = split(model)
    hidden_TD = body(ids_1T, use_cache=False).last_hidden_state[0]
    result = linear_cross_entropy(hidden_TD, head, labels_T, chunk_size=6)
    result.loss_sum.backward()
    torch.testing.assert_close(result.loss_sum, expected, rtol=1e-5, atol=0)
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[parameter_name], rtol=1e-3, atol=1e-4)


def test_a_peft_model_is_taken_apart_with_its_trained_head():
    model = AutoModelForCausalLM.from_config(CONFIGS["tied"])
    peft_model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    body, head = split(peft_model)
    assert body is peft_model.get_base_model().model
    assert head.weight_VD.requires_grad


def test_an_adapter_on_the_head_is_refused():
    model = AutoModelForCausalLM.from_config(CONFIGS["bias (phi)"])
    with pytest.raises(HeadNotLinear, match="Linear"):
        split(get_peft_model(model, LoraConfig(target_modules=["lm_head", "q_proj"])))


def test_a_head_that_does_something_unknown_is_refused():
    model = AutoModelForCausalLM.from_config(CONFIGS["multiplied (cohere)"])
    model.config.logit_scale = 1.0
    with pytest.raises(HeadNotLinear, match="does more"):
        split(model)


def test_a_head_that_bears_the_decoders_name_is_not_taken_for_the_body():
    config = ModernBertDecoderConfig(
        **{name: value for name, value in SMALL.items() if name != "num_key_value_heads"}, head_dim=8
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    assert model.get_decoder() is model.get_output_embeddings()
    with pytest.raises(HeadNotLinear, match="does more"):
        split(model)
