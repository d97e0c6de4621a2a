"""Guards: packed documents give the same logits and gradients as each document alone, or the call is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from gym_trainer.fast import attention
from gym_trainer.fast.packing import PackedLayout
from gym_trainer.fast.prefixes import Prefix

LENGTHS = [5, 1, 12, 7]
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama, grouped queries": LlamaConfig(**SMALL),
    "qwen3, sliding window": Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "gemma2, soft-capped scores": Gemma2Config(**SMALL, sliding_window=4, attn_logit_softcapping=5.0),
    "gpt-oss, attention sinks": GptOssConfig(**SMALL, sliding_window=4, num_local_experts=2, num_experts_per_tok=1),
}


def _model(config, dtype=torch.float64):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_each_document_alone(name):
    dtype = torch.float32 if "gpt-oss" in name else torch.float64  # its grouped matrix product has no float64
    model = _model(CONFIGS[name], dtype)
    ids_1T = torch.randint(0, 97, (1, sum(LENGTHS)))
    weights_TV = torch.randn(sum(LENGTHS), 97, dtype=dtype)

    alone = torch.cat([model(part, use_cache=False).logits[0] for part in ids_1T.split(LENGTHS, dim=1)])
    (alone * weights_TV).sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    with attention.attention_of(model, attention.PER_DOCUMENT):
        layout = PackedLayout.from_lengths(LENGTHS)
        packed = model(ids_1T, use_cache=False, **layout.model_kwargs()).logits[0]
        (packed * weights_TV).sum().backward()
    assert model.config._attn_implementation == "eager"

    # norms and softmax run in float32 whatever the model's dtype
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name in expected:
            torch.testing.assert_close(parameter.grad, expected[parameter_name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_beginning_computed_once_gives_each_document_its_own_logits_and_gradients(name):
    dtype = torch.float32 if "gpt-oss" in name else torch.float64
    model = _model(CONFIGS[name], dtype)
    # the second has 6 tokens of the first before its own, the last two have 7 of the third
    lengths, prefixes = [9, 4, 8, 11, 3], [Prefix(0, 0), Prefix(0, 6), Prefix(0, 0), Prefix(2, 7), Prefix(2, 7)]
    ids_1T = torch.randint(0, 97, (1, sum(lengths)))
    starts = [0, 9, 13, 21, 32]
    own = ids_1T[0].split(lengths)
    whole = [
        torch.cat([ids_1T[0, starts[prefix.document] :][: prefix.length], ids])
        for prefix, ids in zip(prefixes, own, strict=True)
    ]
    weights_TV = torch.randn(sum(lengths), 97, dtype=dtype)

    alone = torch.cat(
        [
            model(ids[None], use_cache=False).logits[0, prefix.length :]
            for ids, prefix in zip(whole, prefixes, strict=True)
        ]
    )
    (alone * weights_TV).sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with attention.attention_of(model, attention.PER_DOCUMENT):
        layout = PackedLayout.from_lengths(lengths, prefixes=prefixes)
        shared = model(ids_1T, use_cache=False, **layout.model_kwargs()).logits[0]
        (shared * weights_TV).sum().backward()

    torch.testing.assert_close(shared, alone, rtol=1e-5, atol=1e-5)
    for parameter_name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(parameter_name).grad, gradient, rtol=1e-4, atol=1e-5)


def test_a_layout_with_a_shared_beginning_says_where_every_key_is():
    layout = PackedLayout.from_lengths([4, 2, 3], prefixes=[Prefix(0, 0), Prefix(0, 3), Prefix(0, 0)])
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 3, 4, 0, 1, 2]]
    assert layout.cu_seq_lens.tolist() == [0, 4, 6, 9]
    assert layout.cu_seq_lens_k.tolist() == [0, 4, 9, 12]
    assert layout.max_length == 8
    assert layout.shared_keys is not None
    places, own, repeats = (x.tolist() for x in layout.shared_keys)
    assert places == [0, 1, 2, 3, 0, 1, 2, 4, 5, 6, 7, 8]
    assert own == [0, 1, 2, 3, 7, 8, 9, 10, 11]
    assert repeats == [4, 5, 6]
    assert PackedLayout.from_lengths([128] * 2, prefixes=[Prefix(0, 0), Prefix(0, 8)]).equal_length is None


@pytest.mark.parametrize(
    "prefixes",
    [(Prefix(1, 2), Prefix(0, 0)), (Prefix(0, 0), Prefix(0, 5)), (Prefix(0, 0), Prefix(0, 2), Prefix(1, 1))],
    ids=["a later document", "more than there is", "one that is not whole"],
)
def test_a_beginning_that_no_document_has_is_refused(prefixes):
    with pytest.raises(ValueError, match=r"document \d"):
        PackedLayout.from_lengths([4] * len(prefixes), prefixes=prefixes)


def test_a_call_without_bounds_is_refused():
    model = _model(CONFIGS["llama, grouped queries"])
    with (
        attention.attention_of(model, attention.PER_DOCUMENT),
        pytest.raises(attention.LeakingAttention, match="cu_seq_lens"),
    ):
        model(torch.zeros(1, 4, dtype=torch.long), use_cache=False)


def test_two_rows_are_refused():
    model = _model(CONFIGS["llama, grouped queries"])
    kwargs = PackedLayout.from_lengths([4]).model_kwargs()
    with (
        attention.attention_of(model, attention.PER_DOCUMENT),
        pytest.raises(attention.LeakingAttention, match="one row"),
    ):
        model(torch.zeros(2, 4, dtype=torch.long), use_cache=False, **kwargs)


@pytest.mark.parametrize("config", [MambaConfig(), Qwen3NextConfig(num_hidden_layers=4)], ids=["mamba", "qwen3-next"])
def test_models_that_mix_documents_are_named(config):
    with pytest.raises(attention.LeakingAttention, match=config.model_type):
        attention.choose(config, "cpu", torch.float32)


def test_check_isolation_finds_a_leak_and_passes_an_isolating_model():
    model = _model(CONFIGS["llama, grouped queries"], torch.float32)
    with attention.attention_of(model, attention.PER_DOCUMENT):
        attention.check_isolation(model)
    forward = model.forward
    model.forward = lambda input_ids, use_cache, **kwargs: forward(input_ids=input_ids, use_cache=use_cache)
    with pytest.raises(attention.LeakingAttention, match="see each other"):
        attention.check_isolation(model)


def test_check_sharing_finds_a_model_that_keeps_the_shared_keys_to_itself():
    model = _model(CONFIGS["llama, grouped queries"], torch.float32)
    with attention.attention_of(model, attention.PER_DOCUMENT):
        attention.check_sharing(model)
        forward = model.forward
        model.forward = lambda shared_keys=None, cu_seq_lens_k=None, **kwargs: forward(**kwargs)
        with pytest.raises(attention.LeakingAttention, match="shared beginning is not seen"):
            attention.check_sharing(model)


def test_check_isolation_finds_positions_that_do_not_begin_anew():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4)).eval()
    with attention.attention_of(model, attention.PER_DOCUMENT):
        attention.check_isolation(model)
        forward = model.forward
        model.forward = lambda position_ids, **kwargs: forward(**kwargs)
        with pytest.raises(attention.LeakingAttention, match="does not begin at position 0"):
            attention.check_isolation(model)


@pytest.mark.parametrize(
    ("config", "device", "dtype", "reason"),
    [
        (CONFIGS["llama, grouped queries"], "cpu", torch.bfloat16, "CUDA"),
        (CONFIGS["llama, grouped queries"], "cuda", torch.float32, "float32"),
        (CONFIGS["gemma2, soft-capped scores"], "cuda", torch.bfloat16, "soft-capping"),
        (CONFIGS["gpt-oss, attention sinks"], "cuda", torch.bfloat16, "sinks"),
    ],
)
def test_varlen_is_refused_by_name(config, device, dtype, reason):
    assert reason in attention.why_not_varlen(config, device, dtype)
    assert attention.choose(config, device, dtype, "varlen") == attention.PER_DOCUMENT


def test_layout_restarts_positions_and_counts_bounds():
    layout = PackedLayout.from_lengths(LENGTHS)
    assert layout.position_ids.tolist() == [[*range(5), 0, *range(12), *range(7)]]
    assert layout.cu_seq_lens.tolist() == [0, 5, 6, 18, 25]
    assert layout.max_length == 16
    with pytest.raises(ValueError, match="at least one token"):
        PackedLayout.from_lengths([3, 0])
