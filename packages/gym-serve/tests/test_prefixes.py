"""Guards the reuse of what was read before: the same tokens, less reading, nothing across adapters, in its budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from tiny_models import greedy_reference, prompts, tiny_model, write_adapter

from gym_serve.engines.base import GenerationRequest, SamplingParams, generate_all
from gym_serve.engines.prefixes import PrefixStore, num_shared
from gym_serve.engines.slots import SlotCache
from gym_serve.engines.transformers import TransformersEngine

ids = st.lists(st.integers(0, 2), max_size=40)
BYTES_A_TOKEN = 4 * 2 * 16 * 2 * 4
"""Of `tiny_model()`: layers, heads, head dimension, keys and values, float32."""


@given(ids, ids, ids)
def test_the_shared_beginning_is_the_longest(common: list[int], one: list[int], other: list[int]) -> None:
    left, right = common + one, common + other
    naive = 0
    while naive < min(len(left), len(right)) and left[naive] == right[naive]:
        naive += 1
    assert num_shared(left, right) == naive >= len(common)


def ask(prompt: Sequence[int], adapter: str | None = None, max_tokens: int = 10) -> GenerationRequest:
    return GenerationRequest(
        prompt_ids=prompt, max_tokens=max_tokens, adapter=adapter, sampling=SamplingParams(temperature=0.0)
    )


MODELS = {"llama": {}, "mistral": {"sliding_window": 24}, "gemma2": {"sliding_window": 24}}


@pytest.mark.parametrize("kind", MODELS)
def test_the_turns_of_a_chat_are_read_once(kind: str) -> None:
    model = tiny_model(kind, **MODELS[kind])
    first, more, last = prompts(3, seed=8, low=30, high=36)
    with TransformersEngine(tiny_model(kind, **MODELS[kind]), max_slots=4, prefix_share=0.5) as engine:
        chat, cached = list(first), []
        for turn in (more, last, []):
            expected = greedy_reference(model, chat, 10)
            stream = engine.submit(ask(chat))
            assert stream.completion().token_ids == expected
            cached.append(stream.num_cached_tokens)
            chat += [*expected, *turn]
        stats = engine.stats()
    # The second and third prompts are the first and its answer, and more: only what is new was read, and the last
    # token of an answer, which nothing had to follow.
    assert stats.num_prompt_tokens == len(first) + (1 + len(more)) + (1 + len(last))
    assert cached == [0, len(first) + 9, len(first) + 10 + len(more) + 9]
    assert stats.num_reused_tokens == sum(cached)


def test_a_beginning_that_is_being_read_is_waited_for() -> None:
    """Eight chats behind one long library at once: it is read by the first, and copied by the others."""
    (library,) = prompts(1, seed=9, low=150, high=151)
    ends = prompts(8, seed=10, low=5, high=9)
    batch = [ask([*library, *end]) for end in ends]
    expected = [greedy_reference(tiny_model(), list(request.prompt_ids), 10) for request in batch]
    with TransformersEngine(tiny_model(), max_slots=8, step_tokens=50, prefix_share=0.2) as engine:
        assert [done.token_ids for done in generate_all(engine, batch)] == expected
        stats = engine.stats()
    assert stats.num_prompt_tokens == len(library) + sum(map(len, ends))
    assert stats.num_reused_tokens == 7 * len(library)


def test_adapters_share_nothing(tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    references = [
        tiny_model(),
        *(PeftModel.from_pretrained(tiny_model(), str(folder)).eval() for folder in folders),
    ]
    (prompt,) = prompts(1, seed=11, low=60, high=61)
    expected = [greedy_reference(model, prompt, 10) for model in references]
    assert len({tuple(answer) for answer in expected}) == 3
    with TransformersEngine(tiny_model(), max_slots=4, prefix_share=0.5) as engine:
        loaded = [None, *(engine.load_adapter(folder) for folder in folders)]
        for _ in range(2):
            for adapter, answer in zip(loaded, expected, strict=True):
                assert engine.submit(ask(prompt, adapter)).completion().token_ids == answer
        batch = [ask(prompt, adapter) for adapter in loaded]
        assert [done.token_ids for done in generate_all(engine, batch)] == expected
        assert engine.stats().num_reused_tokens == 6 * (len(prompt) - 1)


def test_a_small_memory_preempts_and_evicts_and_loses_nothing() -> None:
    (common,) = prompts(1, seed=12, low=40, high=41)
    batch = [ask([*common, *end], max_tokens=30) for end in prompts(6, seed=13, low=10, high=30)]
    expected = [greedy_reference(tiny_model(), list(request.prompt_ids), 30) for request in batch]
    memory = 400 * BYTES_A_TOKEN
    with TransformersEngine(tiny_model(), max_slots=6, kv_cache_bytes=memory, prefix_share=0.25) as engine:
        for _ in range(2):
            streams = [engine.submit(request) for request in batch]
            assert [stream.completion().token_ids for stream in streams] == expected
            # A request that gave way takes its own tokens over again, which are not counted as the prompt's.
            assert all(
                stream.num_cached_tokens < len(request.prompt_ids)
                for stream, request in zip(streams, batch, strict=True)
            )
        assert engine.stats().num_preemptions > 0


def test_the_least_recently_used_gives_way() -> None:
    cache = SlotCache(max_slots=1, max_tokens=256)
    cache.reserve(1, 64)
    cache.layer(0, torch.zeros(1, 1, 1, 2))
    store = PrefixStore(cache, max_tokens=100)
    texts = [[n] * 40 for n in range(3)]
    store.remember(0, None, texts[0])
    store.remember(0, None, texts[1])
    store.remember(0, None, texts[0])
    store.remember(0, None, texts[2])
    assert [store.find(None, text)[1] for text in texts] == [40, 0, 40]
    store.remember(0, None, texts[2] + [7] * 10)
    assert (store.num_tokens, store.find(None, texts[2])[1]) == (90, 40)
    store.remember(0, None, [1] * 101)
    store.remember(0, None, [1] * 15)
    assert store.num_tokens == 90, "what is too long or too short is not kept"
    assert store.find("sha256:other", texts[0]) == (None, 0)
