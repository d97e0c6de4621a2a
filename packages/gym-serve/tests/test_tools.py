# ruff: noqa: E501  (each case is what a model wrote, on one line)
"""Guards tool calls and reasoning in streams: however the text is cut, the pieces join to the same answer."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_data.record import text_message
from gym_serve.engines.base import RequestRefused
from gym_serve.inference import ChatModel, ChatRequest
from gym_serve.inference.tool_json import CallPiece
from gym_serve.inference.tools import Said, ThinkSplitter, Thought, ToolParser, family_of

ScriptedEngine = importlib.import_module("scripted").ScriptedEngine


def joined(pieces) -> tuple[str, list[tuple[str, str]]]:
    text = "".join(piece.text for piece in pieces if isinstance(piece, Said))
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        if isinstance(piece, CallPiece):
            if piece.name is not None:
                assert piece.index not in calls, "a call is named once"
                calls[piece.index] = [piece.name, ""]
            calls[piece.index][1] += piece.arguments
    return text, [(name, arguments) for name, arguments in calls.values()]


CASES = [
    ("hermes", "Let me see.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1.50, \"b\": \"}\"}}\n</tool_call>",
     "Let me see.\n", [("add", '{"a": 1.50, "b": "}"}')]),
    ("hermes", "<tool_call>{\"arguments\": {\"x\": [1, {\"y\": \"\\\"q\"}]}, \"name\": \"late\"}</tool_call>",
     "", [("late", '{"x": [1, {"y": "\\"q"}]}')]),
    ("hermes", "<tool_call>[{\"name\": \"a\", \"arguments\": {}}, {\"name\": \"b\"}]</tool_call>",
     "", [("a", "{}"), ("b", "{}")]),
    ("hermes", "<tool_call>{\"name\": \"a\", \"arguments\": {}}</tool_call>\n<tool_call>{\"name\": \"b\", \"arguments\": {\"k\": null}}</tool_call>",
     "\n", [("a", "{}"), ("b", '{"k": null}')]),
    ("hermes", "<tool_call>{\"name\": \"s\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>", "", [("s", '{"a": 1}')]),
    ("hermes", "I wrote <tool_call>nothing</tool_call> here", "I wrote <tool_call>nothing</tool_call> here", []),
    ("hermes", "a < b and <tool", "a < b and <tool", []),
    ("hermes", "<tool_call>{\"name\": \"cut\", \"arguments\": {\"a\": [1,", "", [("cut", '{"a": [1,')]),
    ("qwen_xml", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=t>\nx y\n</parameter>\n</function>\n</tool_call>",
     "", [("add", '{"a": 1, "t": "x y"}')]),
    ("mistral", "[TOOL_CALLS][{\"name\": \"a\", \"arguments\": {\"q\": 1}}, {\"name\": \"b\", \"arguments\": {}}]",
     "", [("a", '{"q": 1}'), ("b", "{}")]),
    ("mistral", "Hm. [TOOL_CALLS]a[ARGS]{\"q\": 1}[TOOL_CALLS]b[ARGS]{}", "Hm. ", [("a", '{"q": 1}'), ("b", "{}")]),
    ("llama", "{\"name\": \"f\", \"parameters\": {\"é\": \"ü\"}}", "", [("f", '{"é": "ü"}')]),
    ("llama", "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}", "", [("f", "{}")]),
    ("llama", "  Just text with {braces}.", "  Just text with {braces}.", []),
    ("llama", "{\"answer\": 42}", "{\"answer\": 42}", []),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "said", "calls"), CASES)
def test_calls_are_read_whole_and_byte_by_byte(family: str, text: str, said: str, calls: list) -> None:
    for pieces in ([text], list(text)):
        parser = ToolParser(family)
        found = [piece for part in pieces for piece in parser.push(part)] + parser.flush()
        assert joined(found) == (said, calls)


@given(st.sampled_from(CASES), st.data())
def test_calls_do_not_depend_on_how_the_text_is_cut(case, data) -> None:
    family, text, said, calls = case
    parser, found, rest = ToolParser(family), [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        found += parser.push(rest[:size])
        rest = rest[size:]
    assert joined(found + parser.flush()) == (said, calls)


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolParser("hermes")
    assert parser.push('<tool_call>{"name": "f", "argum') == [CallPiece(0, "f")]
    assert parser.push('ents": {"city": "Nai') == [CallPiece(0, None, '{"city": "Nai')]
    assert parser.push('robi"}}</tool_call>') == [CallPiece(0, None, 'robi"}')]


@given(st.data())
def test_thought_is_told_from_speech(data) -> None:
    text = "<think>\nwhy <b>?\n</think>\n\nBecause <thin air."
    splitter, pieces, rest = ThinkSplitter(starts_inside=False), [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces += splitter.push(rest[:size])
        rest = rest[size:]
    pieces += splitter.flush()
    assert "".join(p.text for p in pieces if isinstance(p, Thought)) == "why <b>?\n"
    assert "".join(p.text for p in pieces if isinstance(p, Said)) == "Because <thin air."


def test_thought_that_the_prompt_opened_starts_inside() -> None:
    splitter = ThinkSplitter(starts_inside=True)
    assert splitter.push("hm</think>\nyes") == [Thought("hm"), Said("yes")]


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("... <tool_call>\n{{ tool | tojson }}", "hermes"),
        ("<tool_call> <function=example>", "qwen_xml"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("Environment: ipython", "llama"),
        ("{{ messages }}", None),
    ],
)
def test_the_family_is_read_from_the_template(template: str, family: str | None) -> None:
    assert family_of(template) == family


TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + ' answer <tool_call>' + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = json.dumps(
    [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"q": {}}}}}
        for name in ("find", "count")
    ]
)


@pytest.fixture
def tool_model(smollm2_folder: Path, tmp_path: Path):
    from gym_data import Tokenizer

    folder = tmp_path / "model"
    shutil.copytree(smollm2_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.from_folder(folder)
    return lambda text: ChatModel(ScriptedEngine([*tokenizer.encode(text), 2]), folder)


def ask(**settings) -> ChatRequest:
    return ChatRequest(messages=(text_message("user", "where?"),), tools_json=TOOLS, **settings)


def test_a_chat_with_tools_streams_calls_with_ids(tool_model) -> None:
    text = 'Looking. <tool_call>{"name": "find", "arguments": {"q": "🐘"}}</tool_call>'
    deltas = list(tool_model(text).chat(ask()))
    calls = [call for delta in deltas for call in delta.calls]
    assert "".join(delta.text for delta in deltas) == "Looking. "
    assert [call.name for call in calls if call.name] == ["find"]
    assert calls[0].id.startswith("call_")
    assert "".join(call.arguments for call in calls) == '{"q": "🐘"}'
    assert deltas[-1].finish_reason == "tool_calls"


def test_a_forced_call_is_held_to_its_schema(tool_model) -> None:
    served = tool_model('{"name": "count", "arguments": {"q": 1}}')
    deltas = list(served.chat(ask(tool_choice="count")))
    schema = json.loads(served.engine.requests[0].grammar)
    assert schema["properties"]["name"] == {"const": "count"}
    assert schema["properties"]["arguments"]["properties"] == {"q": {}}
    assert [call.name for delta in deltas for call in delta.calls if call.name] == ["count"]
    assert deltas[-1].finish_reason == "tool_calls"
    many = tool_model("[]")
    many.chat(ask(tool_choice="required"))
    assert json.loads(many.engine.requests[0].grammar)["type"] == "array"
    with pytest.raises(RequestRefused, match="names nobody"):
        tool_model("").chat(ask(tool_choice="nobody"))


def test_no_tools_means_none_are_shown_to_the_model(tool_model) -> None:
    served = tool_model("hi")
    assert served.tokenize(ask(tool_choice="none")) == served.tokenize(
        ChatRequest(messages=(text_message("user", "where?"),))
    )
