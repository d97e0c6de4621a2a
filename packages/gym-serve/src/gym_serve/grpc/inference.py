"""gym.v1.InferenceService."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from gym_data.record import Message, Part, Role, ToolCall
from gym_sdk._proto.gym.v1 import inference_pb2 as pb
from gym_serve.call import Call
from gym_serve.errors import invalid
from gym_serve.generation import Answer, Generation
from gym_serve.grpc.convert import timestamp
from gym_serve.inference import ChatRequest, CompletionRequest, Delta, Usage
from gym_serve.inference.answers import TokenLogprob
from gym_serve.inference.chat import MAX_ANSWERS
from gym_serve.inference.requests import ResponseFormat

Input = TypeVar("Input", pb.ChatCompletionInput, pb.CompletionInput)
Piece = TypeVar("Piece", pb.StreamChatCompletionResponse, pb.StreamCompletionResponse)

_ROLES: dict[int, Role] = {
    pb.CHAT_ROLE_SYSTEM: "system",
    pb.CHAT_ROLE_DEVELOPER: "developer",
    pb.CHAT_ROLE_USER: "user",
    pb.CHAT_ROLE_ASSISTANT: "assistant",
    pb.CHAT_ROLE_TOOL: "tool",
}
_FINISH = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
    None: pb.FINISH_REASON_UNSPECIFIED,
}
_CHOICE_MODES = {
    pb.TOOL_CHOICE_MODE_NONE: "none",
    pb.TOOL_CHOICE_MODE_AUTO: "auto",
    pb.TOOL_CHOICE_MODE_REQUIRED: "required",
}
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


class InferenceRpc:
    """Methods by their names in the schema."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def CreateChatCompletion(
        self, request: pb.CreateChatCompletionRequest, call: Call
    ) -> pb.CreateChatCompletionResponse:
        """A whole answer to a chat."""
        chat = chat_request(request.input)
        choices = [pb.ChatChoice(index=i) for i in range(chat.n)]
        for choice in choices:
            choice.message.role = pb.CHAT_ROLE_ASSISTANT
        texts = ["" for _ in choices]
        async with self._generation.deltas(call, request.input.model, chat) as (answer, deltas):
            async for delta in deltas:
                texts[delta.index] += delta.text
                _add_to_choice(choices[delta.index], delta)
        for choice, text in zip(choices, texts, strict=True):
            if text:
                choice.message.parts.add(text=text)
        return pb.CreateChatCompletionResponse(**_head(answer), choices=choices, usage=_usage(answer.usage))

    def StreamChatCompletion(
        self, request: pb.StreamChatCompletionRequest, call: Call
    ) -> AsyncIterator[pb.StreamChatCompletionResponse]:
        """The same in pieces."""
        return self._stream(
            request.input,
            call,
            chat_request,
            lambda head, delta: pb.StreamChatCompletionResponse(**head, choices=[_chat_delta(delta)]),
            pb.StreamChatCompletionResponse,
        )

    async def CreateCompletion(self, request: pb.CreateCompletionRequest, call: Call) -> pb.CreateCompletionResponse:
        """A text, continued."""
        completion = completion_request(request.input)
        choices = [pb.CompletionChoice(index=i) for i in range(completion.n)]
        async with self._generation.deltas(call, request.input.model, completion) as (answer, deltas):
            async for delta in deltas:
                choice = choices[delta.index]
                choice.text += delta.text
                choice.finish_reason = _FINISH[delta.finish_reason] or choice.finish_reason
                choice.logprobs.extend(_logprobs(delta.logprobs))
        return pb.CreateCompletionResponse(**_head(answer), choices=choices, usage=_usage(answer.usage))

    def StreamCompletion(
        self, request: pb.StreamCompletionRequest, call: Call
    ) -> AsyncIterator[pb.StreamCompletionResponse]:
        """The same in pieces."""
        return self._stream(
            request.input,
            call,
            completion_request,
            lambda head, delta: pb.StreamCompletionResponse(**head, choices=[_completion_delta(delta)]),
            pb.StreamCompletionResponse,
        )

    async def _stream(
        self,
        given: Input,
        call: Call,
        to_request: Callable[[Input], ChatRequest | CompletionRequest],
        piece: Callable[[dict[str, Any], Delta], Piece],
        last: Callable[..., Piece],
    ) -> AsyncIterator[Piece]:
        """A message for each delta, and a last one with the usage."""
        async with self._generation.deltas(call, given.model, to_request(given)) as (answer, deltas):
            head = _head(answer)
            async for delta in deltas:
                yield piece(head, delta)
            yield last(**head, usage=_usage(answer.usage))

    async def TokenizeChat(self, request: pb.TokenizeChatRequest, call: Call) -> pb.TokenizeChatResponse:
        """The prompt as the model would be given it."""
        model, ids, text = await self._generation.tokenize(call, request.input.model, chat_request(request.input))
        return pb.TokenizeChatResponse(model_id=model.id, token_ids=ids, text=text)


def chat_request(given: pb.ChatCompletionInput) -> ChatRequest:
    """The request in the words of `gym_serve.inference`."""
    if not given.messages:
        raise invalid("there is no message", field="input.messages")
    tools = [_tool(tool, index) for index, tool in enumerate(given.tools)]
    choice = "auto" if tools else "none"
    match given.tool_choice.WhichOneof("choice"):
        case "mode":
            choice = _CHOICE_MODES.get(given.tool_choice.mode, choice)
        case "tool_name":
            choice = given.tool_choice.tool_name
        case _:
            pass
    if not tools and choice not in ("none", "auto"):
        raise invalid("tool_choice needs tools", field="input.tool_choice")
    variables = _object(given.template_variables_json, "input.template_variables_json")
    return ChatRequest(
        messages=[_message(message, f"input.messages[{index}]") for index, message in enumerate(given.messages)],
        tools_json=json.dumps(tools, ensure_ascii=False) if tools else None,
        tool_choice=choice,
        parallel_tool_calls=given.parallel_tool_calls if given.HasField("parallel_tool_calls") else True,
        template_variables=variables,
        response_format=_response_format(given.response_format),
        **_settings(given.sampling),
    )


def completion_request(given: pb.CompletionInput) -> CompletionRequest:
    """The request in the words of `gym_serve.inference`."""
    match given.WhichOneof("prompt"):
        case "text":
            prompt: str | list[int] = given.text
        case "token_ids":
            prompt = list(given.token_ids.ids)
        case _:
            raise invalid("a prompt is needed, as text or as token_ids", field="input.prompt")
    return CompletionRequest(
        prompt=prompt,
        echo=given.echo,
        response_format=_response_format(given.response_format),
        **_settings(given.sampling),
    )


def _settings(given: pb.SamplingParameters) -> dict[str, Any]:
    present = {field.name for field, _ in given.ListFields()}
    sampling: dict[str, Any] = {name: getattr(given, name) for name in _SAMPLING if name in present}
    if given.logit_bias:
        sampling["logit_bias"] = dict(given.logit_bias)
    if given.HasField("max_tokens") and given.max_tokens == 0:
        raise invalid("max_tokens must be at least 1", field="input.sampling.max_tokens")
    if given.HasField("n") and not 1 <= given.n <= MAX_ANSWERS:
        # Here, before a list of so many answers is made.
        raise invalid(f"n must be from 1 to {MAX_ANSWERS}", field="input.sampling.n")
    return {
        "sampling": sampling,
        "max_tokens": given.max_tokens if given.HasField("max_tokens") else None,
        "n": given.n if given.HasField("n") else 1,
        "stop": tuple(given.stop),
        "top_logprobs": given.top_logprobs if given.HasField("top_logprobs") else None,
    }


def _message(given: pb.ChatMessage, path: str) -> Message:
    role = _ROLES.get(given.role)
    if role is None:
        raise invalid("the role must be one of SYSTEM, DEVELOPER, USER, ASSISTANT and TOOL", field=f"{path}.role")
    parts = [Part("reasoning", given.reasoning)] if given.reasoning else []
    parts += [Part("text", part.text) for part in given.parts]
    parts += [
        Part("tool_call", call=ToolCall(call.name, call.arguments_json, call.id or None)) for call in given.tool_calls
    ]
    return Message(role, tuple(parts), given.name or None, given.tool_call_id or None)


def _tool(given: pb.Tool, index: int) -> dict[str, object]:
    function: dict[str, object] = {"name": given.name}
    if given.description:
        function["description"] = given.description
    if given.parameters_json:
        function["parameters"] = _object(given.parameters_json, f"input.tools[{index}].parameters_json")
    if given.HasField("strict"):
        function["strict"] = given.strict
    return {"type": "function", "function": function}


def _object(text: str, field: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"not valid JSON: {error}", field=field) from None
    if not isinstance(value, dict):
        raise invalid("must be a JSON object", field=field)
    return value


def _response_format(given: pb.ResponseFormat) -> ResponseFormat:
    match given.WhichOneof("format"):
        case "json_object":
            return ResponseFormat(kind="json_object")
        case "json_schema":
            _object(given.json_schema.schema_json, "input.response_format.json_schema.schema_json")
            return ResponseFormat(kind="json_schema", schema_json=given.json_schema.schema_json)
        case _:
            return ResponseFormat()


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": answer.id, "model_id": answer.model.id, "create_time": timestamp(answer.created_at)}


def _add_to_choice(choice: pb.ChatChoice, delta: Delta) -> None:
    choice.message.reasoning += delta.reasoning
    for piece in delta.calls:
        while len(choice.message.tool_calls) <= piece.index:
            choice.message.tool_calls.add()
        tool_call = choice.message.tool_calls[piece.index]
        tool_call.id = piece.id or tool_call.id
        tool_call.name += piece.name or ""
        tool_call.arguments_json += piece.arguments
    choice.logprobs.extend(_logprobs(delta.logprobs))
    choice.finish_reason = _FINISH[delta.finish_reason] or choice.finish_reason


def _chat_delta(delta: Delta) -> pb.ChatChoiceDelta:
    return pb.ChatChoiceDelta(
        index=delta.index,
        text=delta.text,
        reasoning=delta.reasoning,
        tool_calls=[
            pb.ToolCallDelta(
                index=piece.index, id=piece.id or "", name=piece.name or "", arguments_json=piece.arguments
            )
            for piece in delta.calls
        ],
        finish_reason=_FINISH[delta.finish_reason],
        logprobs=_logprobs(delta.logprobs),
    )


def _completion_delta(delta: Delta) -> pb.CompletionChoice:
    return pb.CompletionChoice(
        index=delta.index,
        text=delta.text,
        finish_reason=_FINISH[delta.finish_reason],
        logprobs=_logprobs(delta.logprobs),
    )


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
    )


def _logprobs(tokens: Sequence[TokenLogprob]) -> list[pb.TokenLogprobs]:
    def one(token: TokenLogprob) -> pb.TokenLogprob:
        return pb.TokenLogprob(token=token.text, token_bytes=token.bytes, token_id=token.id, logprob=token.logprob)

    return [pb.TokenLogprobs(chosen=one(token), top=[one(other) for other in token.top]) for token in tokens]
