"""Guards the way from token ids to what a client reads: whole characters, stop strings, usage, finish reasons."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_data.record import text_message
from gym_serve.engines.base import PromptTooLong, RequestRefused
from gym_serve.inference import ChatModel, ChatRequest, CompletionRequest, ResponseFormat
from gym_serve.inference.text import StopMatcher, TextDecoder

ScriptedEngine = importlib.import_module("scripted").ScriptedEngine
END = 2
HI = (text_message("user", "hi"),)
ANSWER = "Ein 🐘 und 象 gehen 👩‍👩‍👧 über die Straße. ENDE"


@pytest.fixture(scope="session")
def tokenizer(smollm2_folder: Path):
    from gym_data import Tokenizer

    return Tokenizer.from_folder(smollm2_folder)


@pytest.fixture
def model(smollm2_folder: Path, tokenizer):
    """A model that answers `text`, then ends its turn."""

    def make(text: str = ANSWER, *, end: bool = True, **settings) -> ChatModel:
        engine = ScriptedEngine([*tokenizer.encode(text), *([END] if end else [])], **settings)
        return ChatModel(engine, smollm2_folder)

    return make


def chat(**settings) -> ChatRequest:
    return ChatRequest(messages=HI, **settings)


def test_a_streamed_answer_has_whole_characters_and_is_the_whole_answer(model, tokenizer) -> None:
    deltas = list(model().chat(chat()))
    assert "".join(delta.text for delta in deltas) == ANSWER
    assert len(deltas) > 10
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert len(tokenizer.encode("🐘象")) > 2  # of several tokens each
    assert deltas[-1].finish_reason == "stop"
    assert all(delta.finish_reason is None for delta in deltas[:-1])


def test_a_character_that_is_cut_off_by_the_length_is_left_out(model, tokenizer) -> None:
    ids = tokenizer.encode("a 🐘")
    answer = model("a 🐘", end=False).chat(chat(max_tokens=len(ids) - 1))
    deltas = list(answer)
    assert "".join(delta.text for delta in deltas) == "a "
    assert deltas[-1].finish_reason == "length"
    assert answer.usage.completion_tokens == len(ids) - 1


@given(st.text(), st.integers(0, 3))
def test_pieces_join_to_the_text(text: str, split: int) -> None:
    """A decoder of single bytes: the hardest tokenizer for characters."""
    ids = list(text.encode())
    decoder = TextDecoder(lambda some: bytes(some).decode("utf-8", errors="replace"))
    pieces = [decoder.push(i) for i in ids] + [decoder.flush()]
    assert "".join(pieces) == text.rstrip("\ufffd") or "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


# Stop strings


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("ENDE",), ANSWER[: ANSWER.index("ENDE")]),
        (("E",), ""),
        (("象 gehen", "über"), ANSWER[: ANSWER.index("象 gehen")]),
        (("nicht da",), ANSWER),
        ((" ENDE!",), ANSWER),
        (("Straße. ENDE",), ANSWER[: ANSWER.index("Straße")]),
    ],
)
def test_no_part_of_a_stop_string_is_sent(model, tokenizer, stop: tuple[str, ...], expected: str) -> None:
    answer = model().chat(chat(stop=stop))
    seen = ""
    for delta in answer:
        seen += delta.text
        assert expected.startswith(seen)
    assert seen == expected
    assert delta.finish_reason == "stop"


def test_a_stop_string_aborts_the_generation(model) -> None:
    served = model(stepped=True)
    answer = served.chat(chat(stop=("und",)))
    deltas = iter(answer)
    for _ in range(20):
        served.engine.step()
    assert "".join(delta.text for delta in deltas) == "Ein 🐘 "
    assert set(served.engine.aborted) == {served.engine.requests[0].id}


@given(st.text("abE", max_size=30), st.lists(st.text("abE", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_matcher_equals_a_search_of_the_whole(text: str, stops: list[str], data) -> None:
    matcher = StopMatcher(stops)
    sent, rest, stopped = "", text, False
    while rest and not stopped:
        size = data.draw(st.integers(1, len(rest)))
        piece, stopped = matcher.push(rest[:size])
        rest = rest[size:]
        sent += piece
    sent += "" if stopped else matcher.flush()
    ends = [text.find(stop) for stop in stops if stop in text]
    # Text arrives in pieces, so the stop that is complete first wins; none of it may be sent.
    assert stopped == bool(ends)
    if not ends:
        assert sent == text
    else:
        assert text.startswith(sent)
        assert not any(stop in sent for stop in stops)
        assert any(text.startswith(stop, len(sent)) for stop in stops)


# Usage, n, logprobs, refusals


def test_usage_counts_the_ids_in_and_out(model, tokenizer) -> None:
    served = model()
    answer = served.chat(chat(n=3))
    texts = ["", "", ""]
    for delta in answer:
        texts[delta.index] += delta.text
    assert texts == [ANSWER] * 3
    assert answer.usage.prompt_tokens == len(served.tokenize(chat()))
    assert answer.usage.completion_tokens == 3 * (len(tokenizer.encode(ANSWER)) + 1)


def test_answers_on_an_event_loop_equal_those_in_a_thread(model) -> None:
    async def read(n: int) -> list[str]:
        texts = [""] * n
        async for delta in model().chat(chat(n=n, stop=("Straße",))):
            texts[delta.index] += delta.text
        return texts

    expected = ANSWER[: ANSWER.index("Straße")]
    assert asyncio.run(read(1)) == [expected]
    assert asyncio.run(read(3)) == [expected] * 3


def test_a_client_that_leaves_aborts_every_answer(model) -> None:
    async def leave() -> ChatModel:
        served = model(stepped=True)
        deltas = aiter(served.chat(chat(n=2)))
        for _ in range(3):
            served.engine.step()
        await anext(deltas)
        await deltas.aclose()
        return served

    served = asyncio.run(leave())
    assert sorted(served.engine.aborted) == sorted(request.id for request in served.engine.requests)
    assert served.engine.stats().num_running == 0


def test_seeds_of_several_answers_differ_and_are_fixed(model) -> None:
    served = model()
    list(served.chat(chat(n=3, sampling={"seed": 7})))
    assert [request.sampling.seed for request in served.engine.requests] == [7, 8, 9]


def test_logprobs_have_the_bytes_of_each_token(model, tokenizer) -> None:
    deltas = list(model("a 🐘").chat(chat(top_logprobs=1)))
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert b"".join(entry.bytes for entry in entries[:-1]).decode() == "a 🐘"
    assert entries[-1].text == "<|im_end|>"
    assert all(entry.top[0].id == entry.id for entry in entries)


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(model) -> None:
    with pytest.raises(PromptTooLong) as caught:
        model(context_length=20).chat(chat())
    assert (caught.value.context_length, caught.value.num_prompt_tokens) == (20, len(model().tokenize(chat())))
    assert "20" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"n": 0}, "n is 0"),
        ({"top_logprobs": 21}, "top_logprobs is 21"),
        ({"stop": tuple("abcdefghijklmnopq")}, "17 stop strings"),
        ({"sampling": {"temperature": -1}}, "temperature is -1"),
        ({"tools_json": '[{"type": "function", "function": {"name": "f"}}]'}, "no place for tools"),
    ],
)
def test_settings_out_of_range_are_refused(model, settings: dict, says: str) -> None:
    with pytest.raises(RequestRefused, match=says):
        model().chat(chat(**settings))


def test_absent_settings_take_the_models_own_and_zero_stays_zero(smollm2_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(smollm2_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    generation = {"eos_token_id": [2], "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    served = ChatModel(ScriptedEngine([END]), folder)
    assert served.sampling({}).temperature == 0.6
    assert served.sampling({"temperature": 0.0}).greedy
    assert served.sampling({"temperature": 0.0}).top_p == 0.9


def test_an_adapters_own_template_and_end_of_turn_win(smollm2_folder: Path, tmp_path: Path, tokenizer) -> None:
    template = "{% for m in messages %}{{ '<repo_name>' + m['content'] + '<file_sep>' }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5]}))
    served = ChatModel(ScriptedEngine([END]), smollm2_folder, adapter="sha256:x", adapter_folder=tmp_path)
    assert served.tokenize(chat()) == [3, *tokenizer.encode("hi"), 5]
    assert 5 in served.stop_ids


def test_completions_continue_text_and_echo_it(model, tokenizer) -> None:
    served = model(" so on.")
    answer = served.complete(CompletionRequest(prompt="And <|im_end|>", echo=True))
    assert "".join(delta.text for delta in answer) == "And <|im_end|> so on."
    assert END not in served.engine.requests[0].prompt_ids  # a user's text never becomes a control token
    served.complete(CompletionRequest(prompt=[1, END, 7]))
    assert served.engine.requests[1].prompt_ids == [1, END, 7]


def test_response_formats_become_grammars(model) -> None:
    served = model()
    schema = '{"type": "object", "properties": {"n": {"type": "integer"}}}'
    served.chat(chat(response_format=ResponseFormat(kind="json_schema", schema_json=schema)))
    served.chat(chat(response_format=ResponseFormat(kind="json_object")))
    assert [request.grammar for request in served.engine.requests] == [schema, '{"type": "object"}']
