"""Chat requests and answers between plain values (or `openai`-style dicts) and the messages of gym.v1."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gym_sdk._proto.gym.v1 import inference_pb2 as pb
from gym_sdk.client import chat_types as types
from gym_sdk.client._convert import time_of
from gym_sdk.errors import UserError, Where

MessageInput = types.ChatMessage | Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "n",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "top_logprobs",
)


def chat_input(
    model: str,
    messages: str | Iterable[MessageInput],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
    response_format: Mapping[str, Any] | None = None,
    template_variables: Mapping[str, Any] | None = None,
    stop: str | Sequence[str] = (),
    logit_bias: Mapping[int, float] | None = None,
    **sampling: Any,
) -> pb.ChatCompletionInput:
    """The message of a chat request. Raises UserError for what the types cannot hold."""
    turns = [types.ChatMessage(role="user", text=messages)] if isinstance(messages, str) else list(messages)
    return pb.ChatCompletionInput(
        model=model,
        messages=[_message(turn, index) for index, turn in enumerate(turns)],
        sampling=_sampling(sampling, stop, logit_bias),
        tools=[_tool(tool, index) for index, tool in enumerate(tools)],
        tool_choice=_tool_choice(tool_choice),
        parallel_tool_calls=parallel_tool_calls,
        response_format=_response_format(response_format),
        template_variables_json=json.dumps(dict(template_variables)) if template_variables else "",
    )


def _sampling(
    values: Mapping[str, Any], stop: str | Sequence[str], logit_bias: Mapping[int, float] | None
) -> pb.SamplingParameters:
    if unknown := [name for name in values if name not in SAMPLING]:
        raise UserError(
            f"unknown parameter {unknown[0]}", hint=f"known ones are {', '.join(SAMPLING)}, stop, logit_bias"
        )
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    try:
        return pb.SamplingParameters(
            **given,
            stop=[stop] if isinstance(stop, str) else list(stop),
            logit_bias={int(token): bias for token, bias in (logit_bias or {}).items()},
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"a sampling parameter is not valid: {error}") from None


def _message(turn: MessageInput, index: int) -> pb.ChatMessage:
    where = Where(path=f"messages[{index}]")
    if isinstance(turn, types.ChatMessage):
        role, text, calls = turn.role, turn.text, turn.tool_calls
        name, call_id, reasoning = turn.name, turn.tool_call_id, turn.reasoning
    else:
        role, text = turn.get("role"), _text(turn.get("content"), where)
        calls = tuple(_call(call, where) for call in turn.get("tool_calls") or ())
        name, call_id = turn.get("name") or "", turn.get("tool_call_id") or ""
        reasoning = turn.get("reasoning_content") or turn.get("reasoning") or ""
    if role not in ROLES:
        raise UserError(f"{role!r} is not a role; roles are {', '.join(ROLES)}", where=where)
    return pb.ChatMessage(
        role=pb.ChatRole.Value(f"CHAT_ROLE_{role.upper()}"),
        parts=[pb.ContentPart(text=text)] if text or not calls else [],
        name=name,
        tool_call_id=call_id,
        tool_calls=[pb.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json) for call in calls],
        reasoning=reasoning,
    )


def _text(content: Any, where: Where) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        return "".join(part["text"] for part in content)
    raise UserError("content is text, or a list of parts of type text", where=where)


def _call(call: Mapping[str, Any], where: Where) -> types.ToolCall:
    function = call.get("function")
    if not isinstance(function, Mapping) or "name" not in function:
        raise UserError("a tool call is {id, type: function, function: {name, arguments}}", where=where)
    arguments = function.get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return types.ToolCall(id=call.get("id", ""), name=function["name"], arguments_json=text)


def _tool(tool: Mapping[str, Any], index: int) -> pb.Tool:
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError("a tool is {type: function, function: {name, parameters}}", where=Where(path=f"tools[{index}]"))
    return pb.Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters_json=json.dumps(function.get("parameters") or {}, ensure_ascii=False),
        strict=function.get("strict"),
    )


def _tool_choice(choice: str | Mapping[str, Any] | None) -> pb.ToolChoice | None:
    if choice is None:
        return None
    if choice in ("none", "auto", "required"):
        return pb.ToolChoice(mode=pb.ToolChoiceMode.Value(f"TOOL_CHOICE_MODE_{choice.upper()}"))  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(choice, str):
        return pb.ToolChoice(tool_name=choice)
    return pb.ToolChoice(tool_name=choice["function"]["name"])


def _response_format(wanted: Mapping[str, Any] | None) -> pb.ResponseFormat | None:
    kind = None if wanted is None else wanted.get("type")
    if wanted is None or kind is None:
        if wanted is None:
            return None
        raise UserError("response_format is {type: text | json_object | json_schema}")
    if kind == "text":
        return pb.ResponseFormat(text=pb.TextFormat())
    if kind == "json_object":
        return pb.ResponseFormat(json_object=pb.JsonObjectFormat())
    if kind == "json_schema":
        inner = wanted["json_schema"]
        schema = json.dumps(inner["schema"], ensure_ascii=False)
        return pb.ResponseFormat(
            json_schema=pb.JsonSchemaFormat(
                name=inner.get("name", "answer"), schema_json=schema, strict=inner.get("strict")
            )
        )
    raise UserError(f"response_format has no type {kind!r}; types are text, json_object and json_schema")


def chat_completion(message: pb.CreateChatCompletionResponse) -> types.ChatCompletion:
    """An answer."""
    return types.ChatCompletion(
        id=message.id,
        model=message.model_id,
        create_time=time_of(message, "create_time"),
        choices=tuple(
            types.ChatChoice(
                index=choice.index,
                message=_chat_message(choice.message),
                finish_reason=FINISH_REASONS.get(choice.finish_reason),
                logprobs=_logprobs(choice.logprobs),
            )
            for choice in message.choices
        ),
        usage=_usage(message.usage) if message.HasField("usage") else None,
    )


def chat_chunk(message: pb.StreamChatCompletionResponse) -> types.ChatChunk:
    """A piece of an answer."""
    return types.ChatChunk(
        id=message.id,
        model=message.model_id,
        choices=tuple(
            types.ChatDelta(
                index=choice.index,
                text=choice.text,
                reasoning=choice.reasoning,
                tool_calls=tuple(
                    types.ToolCallDelta(
                        index=call.index, id=call.id, name=call.name, arguments_json=call.arguments_json
                    )
                    for call in choice.tool_calls
                ),
                finish_reason=FINISH_REASONS.get(choice.finish_reason),
                logprobs=_logprobs(choice.logprobs),
            )
            for choice in message.choices
        ),
        usage=_usage(message.usage) if message.HasField("usage") else None,
    )


def _chat_message(message: pb.ChatMessage) -> types.ChatMessage:
    return types.ChatMessage(
        role=pb.ChatRole.Name(message.role).removeprefix("CHAT_ROLE_").lower(),
        text="".join(part.text for part in message.parts),
        name=message.name,
        tool_call_id=message.tool_call_id,
        tool_calls=tuple(
            types.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json)
            for call in message.tool_calls
        ),
        reasoning=message.reasoning,
    )


def _logprobs(tokens: Iterable[pb.TokenLogprobs]) -> tuple[types.TokenLogprob, ...]:
    def one(token: pb.TokenLogprob, top: Iterable[pb.TokenLogprob] = ()) -> types.TokenLogprob:
        return types.TokenLogprob(
            token=token.token,
            token_bytes=token.token_bytes,
            token_id=token.token_id,
            logprob=token.logprob,
            top=tuple(one(each) for each in top),
        )

    return tuple(one(each.chosen, each.top) for each in tokens)


def _usage(usage: pb.Usage) -> types.Usage:
    return types.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )
