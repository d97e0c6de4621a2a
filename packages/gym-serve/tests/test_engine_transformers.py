"""Guards the embedded engine: its tokens equal `generate`'s, alone and batched; who is in the batch changes nothing."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from gym_sdk.errors import ModelError
from gym_serve.engines.base import (
    EngineError,
    Finish,
    GenerationRequest,
    PromptTooLong,
    RequestRefused,
    SamplingParams,
    generate_all,
)
from gym_serve.engines.transformers import TransformersEngine

tiny = importlib.import_module("tiny_models")
GREEDY = SamplingParams(temperature=0.0)
NUM_TOKENS = 24


def request(prompt: list[int], **settings) -> GenerationRequest:
    return GenerationRequest(prompt_ids=prompt, **({"max_tokens": NUM_TOKENS, "sampling": GREEDY} | settings))


def ids_of(engine: TransformersEngine, requests: list[GenerationRequest]) -> list[list[int]]:
    return [completion.token_ids for completion in generate_all(engine, requests)]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 4}),
        ("qwen2", {}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
        ("mistral", {"sliding_window": 8}),
        ("gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 16}),
        ("gemma3_text", {"sliding_window": 8, "query_pre_attn_scalar": 16}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
        ("phi3", {}),
    ],
)
def test_greedy_tokens_equal_generate(kind: str, settings: dict) -> None:
    model = tiny.tiny_model(kind, **settings)
    prompts = tiny.prompts(9)
    expected = [tiny.greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) > 4  # the model says different things
    # Four slots for nine requests, prompts in pieces of 16: requests join, wait, move and leave.
    with TransformersEngine(model, max_slots=4, step_tokens=16) as engine:
        assert ids_of(engine, [request(prompt) for prompt in prompts]) == expected
        assert ids_of(engine, [request(prompts[0])]) == expected[:1]


def test_smollm2_says_the_same_as_generate(smollm2_folder: Path) -> None:
    from gym_data import ChatRenderer, Tokenizer
    from gym_data.record import text_message
    from gym_serve.models import load_model, resolve

    model = load_model(resolve(str(smollm2_folder)))
    renderer = ChatRenderer(Tokenizer.from_folder(smollm2_folder))
    asked = ["What is the capital of France?", "Name three animals of the savanna.", "Say hi."]
    prompts = [renderer.encode_prompt([text_message("user", text)]) for text in asked]
    expected = [tiny.greedy_reference(model, prompt, 12) for prompt in prompts]
    with TransformersEngine(model) as engine:
        assert ids_of(engine, [request(prompt, max_tokens=12) for prompt in prompts]) == expected


def test_a_small_memory_preempts_and_loses_nothing() -> None:
    model = tiny.tiny_model()
    prompts = tiny.prompts(6, low=60, high=90)
    expected = [tiny.greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    bytes_per_token = 4 * 2 * 2 * 16 * 4
    with TransformersEngine(model, max_slots=6, kv_cache_bytes=300 * bytes_per_token) as engine:
        assert ids_of(engine, [request(prompt) for prompt in prompts]) == expected
        assert engine.stats().num_preemptions > 0


# Adapters


def test_each_row_speaks_with_its_own_adapter(tmp_path: Path) -> None:
    kinds = [
        {"rank": 4},
        {"rank": 8, "use_rslora": True},
        {"rank": 2, "targets": ["gate_proj", "k_proj"]},
        {"rank": 4, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 6}},
        {"rank": 4, "use_dora": True},
    ]
    folders = [tiny.write_adapter(tmp_path / str(i), seed=i, **kind) for i, kind in enumerate(kinds)]
    prompts = tiny.prompts(24)
    owners = [i % (len(folders) + 1) for i in range(len(prompts))]  # the last is the base
    expected = []
    models = [PeftModel.from_pretrained(tiny.tiny_model(), str(folder)).eval() for folder in folders]
    models.append(tiny.tiny_model())
    expected = [tiny.greedy_reference(models[o], prompt, NUM_TOKENS) for o, prompt in zip(owners, prompts, strict=True)]
    assert expected[0] != tiny.greedy_reference(models[-1], prompts[0], NUM_TOKENS)
    with TransformersEngine(tiny.tiny_model(), max_slots=8, step_tokens=32) as engine:
        ids: list[str | None] = [engine.load_adapter(folder) for folder in folders]
        ids.append(None)
        requests = [request(prompt, adapter=ids[o]) for o, prompt in zip(owners, prompts, strict=True)]
        assert ids_of(engine, requests) == expected
        assert ids_of(engine, requests[:1]) == expected[:1]  # alone: no mask, one adapter


def test_an_adapter_is_pinned_while_it_is_used_and_known_by_its_content(tmp_path: Path) -> None:
    old = tiny.write_adapter(tmp_path / "ranger", seed=1)
    prompt = tiny.prompts(1, low=10, high=11)[0]
    expected_old = tiny.greedy_reference(PeftModel.from_pretrained(tiny.tiny_model(), str(old)), prompt, 100)
    with TransformersEngine(tiny.tiny_model()) as engine:
        first = engine.load_adapter(old)
        running = engine.submit(request(prompt, adapter=first, max_tokens=100))
        engine.unload_adapter(first)
        assert first not in engine.adapters
        with pytest.raises(RequestRefused, match="no adapter"):
            engine.submit(request(prompt, adapter=first))
        new = tiny.write_adapter(tmp_path / "ranger", seed=2)  # the same name and folder, other weights
        expected_new = tiny.greedy_reference(PeftModel.from_pretrained(tiny.tiny_model(), str(new)), prompt, NUM_TOKENS)
        second = engine.load_adapter(new)
        assert second != first
        fresh = engine.submit(request(prompt, adapter=second))
        assert running.completion().token_ids == expected_old
        assert fresh.completion().token_ids == expected_new
        assert engine.adapters == {second}


def test_another_rows_broken_numbers_reach_no_one(tmp_path: Path) -> None:
    """Activations that overflow under one adapter must not become NaN in a neighbour through a product with zero."""
    from safetensors.torch import load_file, save_file

    wild = tiny.write_adapter(tmp_path / "wild", seed=3)
    weights = {key: value * 1e30 for key, value in load_file(wild / "adapter_model.safetensors").items()}
    save_file(weights, wild / "adapter_model.safetensors")
    prompt = tiny.prompts(1)[0]
    expected = tiny.greedy_reference(tiny.tiny_model(), prompt, NUM_TOKENS)
    with TransformersEngine(tiny.tiny_model()) as engine:
        adapter = engine.load_adapter(wild)
        requests = [request(prompt), request(prompt, adapter=adapter), request(prompt)]
        answers = ids_of(engine, requests)
        assert answers[0] == answers[2] == expected


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"bias": "all"}, "sets bias"),
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save"),
    ],
)
def test_adapters_that_cannot_be_mixed_are_refused_and_the_engine_goes_on(tmp_path: Path, settings, says) -> None:
    folder = tiny.write_adapter(tmp_path / "a", seed=1, **settings)
    with TransformersEngine(tiny.tiny_model()) as engine:
        with pytest.raises(ModelError, match=says):
            engine.load_adapter(folder)
        assert len(ids_of(engine, [request([5, 6])])[0]) == NUM_TOKENS


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny.write_adapter(tmp_path / "a", seed=1)
    weights = load_file(folder / "adapter_model.safetensors")
    weights[min(weights)][0, 0] = float("nan")
    save_file(weights, folder / "adapter_model.safetensors")
    with TransformersEngine(tiny.tiny_model()) as engine, pytest.raises(ModelError, match="not finite"):
        engine.load_adapter(folder)


# Requests


def test_stop_ids_end_an_answer_and_are_counted() -> None:
    model = tiny.tiny_model()
    prompt = tiny.prompts(1)[0]
    answer = tiny.greedy_reference(model, prompt, NUM_TOKENS)
    stop = answer[7]
    with TransformersEngine(model) as engine:
        completion = engine.submit(request(prompt, stop_ids=frozenset([stop]))).completion()
    end = answer.index(stop) + 1
    assert completion.token_ids == answer[:end]
    assert completion.finish == Finish("stop", len(prompt), end)


def test_length_ends_an_answer_at_max_tokens_or_the_context() -> None:
    with TransformersEngine(tiny.tiny_model(), context_length=30) as engine:
        short = engine.submit(request([5, 6, 7], max_tokens=4)).completion()
        full = engine.submit(request([5, 6, 7], max_tokens=None)).completion()
    assert short.finish == Finish("length", 3, 4)
    assert full.finish == Finish("length", 3, 27)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"prompt_ids": [5] * 40}, PromptTooLong, "the prompt has 40 tokens; the context holds 30"),
        ({"prompt_ids": [5] * 30}, PromptTooLong, "the prompt has 30 tokens; the context holds 30"),
        ({"prompt_ids": []}, RequestRefused, "empty"),
        ({"prompt_ids": [5, 4000]}, RequestRefused, "token id 4000 is not in the vocabulary of 128"),
        ({"prompt_ids": [5], "max_tokens": 0}, RequestRefused, "at least 1"),
        ({"prompt_ids": [5], "adapter": "sha256:nobody"}, RequestRefused, "no adapter"),
    ],
)
def test_what_cannot_be_served_is_refused_at_submit(settings: dict, error: type[Exception], says: str) -> None:
    with TransformersEngine(tiny.tiny_model(), context_length=30) as engine, pytest.raises(error, match=says):
        engine.submit(GenerationRequest(**settings))


@pytest.mark.parametrize(
    "settings",
    [{"temperature": -1}, {"top_p": 1.5}, {"temperature": float("nan")}, {"presence_penalty": 3}, {"top_k": -1}],
)
def test_sampling_out_of_range_is_refused(settings: dict) -> None:
    with pytest.raises(RequestRefused, match=next(iter(settings))):
        SamplingParams(**settings)


def test_abort_ends_within_a_step_and_frees_the_slot() -> None:
    with TransformersEngine(tiny.tiny_model(), max_slots=1) as engine:
        stream = engine.submit(request([5, 6], max_tokens=200))
        tokens = []
        for token in stream:
            tokens.append(token)
            if len(tokens) == 3:
                stream.abort()
        assert stream.finish is not None
        assert stream.finish.reason == "abort"
        assert len(tokens) < 200
        assert stream.finish.num_tokens == len(tokens)
        assert engine.submit(request([5, 6], max_tokens=2)).completion().finish.reason == "length"
        engine.abort("never-was")


def test_close_ends_open_streams_and_gives_the_model_back() -> None:
    model = tiny.tiny_model().train()
    attention = model.config._attn_implementation
    engine = TransformersEngine(model, max_slots=1)
    streams = [engine.submit(request([5, 6], max_tokens=250)) for _ in range(3)]
    engine.close()
    assert {stream.completion().finish.reason for stream in streams} == {"abort"}
    assert model.training
    assert model.config._attn_implementation == attention
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, tiny.VOCAB_SIZE)
    with pytest.raises(EngineError, match="closed"):
        engine.submit(request([5]))


def test_a_grammar_that_breaks_off_ends_its_own_answer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaking:
        is_complete = False

        def allowed(self) -> torch.Tensor:
            return torch.ones(tiny.VOCAB_SIZE, dtype=torch.bool)

        def consume(self, token_id: int) -> None:
            raise RequestRefused("too complex")

    with TransformersEngine(tiny.tiny_model()) as engine:
        monkeypatch.setattr(engine, "_matcher", lambda request: Breaking() if request.grammar else None)
        free, held = engine.submit(request([5, 6])), engine.submit(request([5, 7], grammar='start: "x"'))
        with pytest.raises(RequestRefused, match="too complex"):
            held.completion()
        assert len(free.completion().token_ids) == NUM_TOKENS


def test_a_failing_step_is_an_error_to_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    with TransformersEngine(tiny.tiny_model()) as engine:
        monkeypatch.setattr(engine._slots, "forward", lambda *_: 1 / 0)
        stream = engine.submit(request([5, 6]))
        with pytest.raises(EngineError, match="division by zero"):
            stream.completion()
        with pytest.raises(EngineError):
            engine.submit(request([5, 6]))
        assert engine.has_failed


def test_running_out_of_memory_ends_its_requests_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with TransformersEngine(tiny.tiny_model()) as engine:
        forward = engine._slots.forward

        def fail_once(*_):
            monkeypatch.setattr(engine._slots, "forward", forward)
            raise torch.OutOfMemoryError("no more")

        monkeypatch.setattr(engine._slots, "forward", fail_once)
        with pytest.raises(EngineError, match="ran out of memory"):
            engine.submit(request([5, 6])).completion()
        assert len(engine.submit(request([5, 6])).completion().token_ids) == NUM_TOKENS


def test_a_peft_model_in_training_can_be_asked(tmp_path: Path) -> None:
    folder = tiny.write_adapter(tmp_path / "a", seed=1)
    model = PeftModel.from_pretrained(tiny.tiny_model(), str(folder), is_trainable=True).train()
    prompt = tiny.prompts(1)[0]
    with TransformersEngine(model) as engine:
        answer = engine.submit(request(prompt)).completion().token_ids
    assert model.training
    assert answer == tiny.greedy_reference(model.eval(), prompt, NUM_TOKENS)


def test_streams_are_read_from_many_threads() -> None:
    model = tiny.tiny_model()
    prompts = tiny.prompts(12)
    expected = [tiny.greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    answers: dict[int, list[int]] = {}
    with TransformersEngine(model, max_slots=4) as engine:

        def ask(i: int) -> None:
            answers[i] = engine.submit(request(prompts[i])).completion().token_ids

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [answers[i] for i in range(len(prompts))] == expected


async def _collect(stream) -> list[int]:
    return [token.id async for token in stream]


def test_streams_are_read_on_an_event_loop() -> None:
    import asyncio

    model = tiny.tiny_model()
    prompts = tiny.prompts(6)
    expected = [tiny.greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    with TransformersEngine(model, max_slots=4) as engine:

        async def main() -> list[list[int]]:
            return list(await asyncio.gather(*(_collect(engine.submit(request(prompt))) for prompt in prompts)))

        assert asyncio.run(main()) == expected


def test_a_model_with_other_states_is_refused() -> None:
    model = tiny.tiny_model(
        "qwen3_next",
        num_experts=4,
        num_experts_per_tok=2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    with pytest.raises(ModelError, match="linear_attention layers"):
        TransformersEngine(model)
