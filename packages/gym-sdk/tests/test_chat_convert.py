"""Guards what a chat request carries: `openai`-style dicts arrive whole, zeros stay zeros, JSON text stays as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gym_sdk._proto.gym.v1 import inference_pb2 as pb
from gym_sdk.client._chat_convert import chat_chunk, chat_completion, chat_input
from gym_sdk.client.chat_types import ChatCollector, ChatMessage, ToolCall
from gym_sdk.errors import UserError

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA, "strict": False}}
CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"n": 1.0}'}}


def test_turns_of_the_openai_client_arrive_whole() -> None:
    request = chat_input(
        "base",
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "7", "tool_call_id": "call-1"},
        ],
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
        template_variables={"enable_thinking": False},
        stop="END",
        logit_bias={5: -100},
    )
    developer, user, assistant, tool = request.messages
    assert (developer.role, developer.parts[0].text) == (pb.CHAT_ROLE_DEVELOPER, "Be brief.")
    assert (user.parts[0].text, user.name) == ("ab", "Ann")
    assert list(assistant.parts) == []
    assert assistant.tool_calls[0].arguments_json == '{"n": 1.0}'
    assert tool.tool_call_id == "call-1"
    assert json.loads(request.tools[0].parameters_json) == SCHEMA
    assert request.tools[0].strict is False
    assert request.tools[0].HasField("strict")
    assert request.tool_choice.tool_name == "weather"
    assert json.loads(request.response_format.json_schema.schema_json) == SCHEMA
    assert json.loads(request.template_variables_json) == {"enable_thinking": False}
    assert list(request.sampling.stop) == ["END"]
    assert dict(request.sampling.logit_bias) == {5: -100.0}


def test_a_zero_is_a_zero_and_nothing_is_nothing() -> None:
    sampling = chat_input("m", "hi", temperature=0, seed=0, presence_penalty=0.0, top_p=None).sampling
    assert sampling.HasField("temperature")
    assert sampling.HasField("seed")
    assert sampling.HasField("presence_penalty")
    assert not sampling.HasField("top_p")
    assert not sampling.HasField("max_tokens")


def test_typed_turns_arrive_whole() -> None:
    turn = ChatMessage(
        role="assistant", text="x", reasoning="why", tool_calls=(ToolCall(id="1", name="f", arguments_json="{"),)
    )
    (message,) = chat_input("m", [turn]).messages
    assert (message.parts[0].text, message.reasoning) == ("x", "why")
    assert message.tool_calls[0].arguments_json == "{"


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]: 'robot' is not a role"),
    ({"messages": [{"content": "x"}]}, "messages[0]: None is not a role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]: content is text"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0]: a tool call is"),
    ({"messages": "x", "tools": [{"type": "function"}]}, "tools[0]: a tool is"),
    ({"messages": "x", "response_format": {"type": "xml"}}, "response_format has no type 'xml'"),
    ({"messages": "x", "temprature": 1}, "unknown parameter temprature"),
    ({"messages": "x", "max_tokens": -1}, "a sampling parameter is not valid"),
    ({"messages": "x", "temperature": "hot"}, "a sampling parameter is not valid"),
]


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES)
def test_a_mistake_in_a_request_is_told_before_it_is_sent(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        chat_input("m", **arguments)
    assert str(caught.value).startswith(expected)


def test_an_answer_is_read_whole() -> None:
    message = pb.CreateChatCompletionResponse(id="c", model_id="m@2")
    choice = message.choices.add(index=0, finish_reason=pb.FINISH_REASON_TOOL_CALLS)
    choice.message.role = pb.CHAT_ROLE_ASSISTANT
    choice.message.tool_calls.add(id="1", name="f", arguments_json="{}")
    token = choice.logprobs.add()
    token.chosen.token, token.chosen.token_bytes, token.chosen.logprob, token.chosen.token_id = "�", b"\xf0", -0.5, 9
    token.top.add(token="b", logprob=-1.0)
    answer = chat_completion(message)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.tool_calls == (ToolCall(id="1", name="f", arguments_json="{}"),)
    (first,) = answer.choices[0].logprobs
    assert (first.token_bytes, first.token_id, first.top[0].token) == (b"\xf0", 9, "b")
    assert (answer.text, answer.usage) == ("", None)


def test_pieces_come_together_to_the_whole() -> None:
    collector = ChatCollector()
    for index, arguments in ((0, '{"a'), (1, "{"), (0, '": 1}'), (1, "}")):
        message = pb.StreamChatCompletionResponse(id="c", model_id="m")
        delta = message.choices.add(index=0)
        delta.tool_calls.add(index=index, arguments_json=arguments, id=f"call-{index}" if arguments[0] == "{" else "")
        collector.add(chat_chunk(message))
    last = pb.StreamChatCompletionResponse(usage=pb.Usage(prompt_tokens=1, completion_tokens=2))
    last.choices.add(index=0, finish_reason=pb.FINISH_REASON_TOOL_CALLS)
    second = last.choices.add(index=1, text="other")
    second.finish_reason = pb.FINISH_REASON_STOP
    collector.add(chat_chunk(last))
    whole = collector.completion()
    assert [(call.id, call.arguments_json) for call in whole.choices[0].message.tool_calls] == [
        ("call-0", '{"a": 1}'),
        ("call-1", "{}"),
    ]
    assert [choice.finish_reason for choice in whole.choices] == ["tool_calls", "stop"]
    assert whole.choices[1].message.text == "other"
    assert whole.usage is not None
    assert whole.usage.total_tokens == 3
