"""OpenAI's `/v1/chat/completions`, whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gym_serve.errors import as_service_error
from gym_serve.generation import Answer, Generation
from gym_serve.http.disconnect import until_disconnect
from gym_serve.http.errors import SSE_END, error_body, read_body, sse
from gym_serve.http.gateway import call_of, log_failure
from gym_serve.http.messages import ChatBody
from gym_serve.http.streams import SSE_HEADERS, GuardedStream
from gym_serve.inference import ChatRequest, Delta, Usage
from gym_serve.inference.answers import TokenLogprob
from gym_serve.limits import StreamLimiter


def chat_routes(generation: Generation, streams: StreamLimiter) -> list[Route]:
    """The routes."""

    async def create(request: Request) -> Response:
        body = await read_body(request, ChatBody)
        chat = body.to_request()
        if not body.stream:
            with streams.hold(call_of(request).key):
                return JSONResponse(await until_disconnect(request.receive, _whole(generation, request, body, chat)))
        # Entered here, so that a refusal is an HTTP error; left when the stream ends or its client goes away.
        async with AsyncExitStack() as stack:
            stack.enter_context(streams.hold(call_of(request).key))
            answer = await stack.enter_async_context(generation.open(call_of(request), body.model, chat))
            entered = stack.pop_all()
        frames = _frames(entered, answer, body, request)
        return GuardedStream(frames, media_type="text/event-stream", headers=SSE_HEADERS, stack=entered)

    return [Route("/v1/chat/completions", create, methods=["POST"])]


@dataclass(kw_only=True)
class _Choice:
    """One answer as it grows."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        for piece in delta.calls:
            call = self.calls.setdefault(piece.index, {"id": "", "name": "", "arguments": ""})
            call["id"] = piece.id or call["id"]
            call["name"] += piece.name or ""
            call["arguments"] += piece.arguments

    def message(self) -> dict[str, object]:
        message: dict[str, object] = {
            "role": "assistant",
            "content": self.text if self.text or not self.calls else None,
            "refusal": None,
        }
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for _, call in sorted(self.calls.items())
            ]
        return message


async def _whole(generation: Generation, request: Request, body: ChatBody, chat: ChatRequest) -> dict[str, object]:
    choices = [_Choice() for _ in range(chat.n)]
    async with generation.deltas(call_of(request), body.model, chat) as (answer, deltas):
        async for delta in deltas:
            choices[delta.index].add(delta)
    return {
        **_head(answer, body.model, "chat.completion"),
        "choices": [
            {
                "index": index,
                "message": choice.message(),
                "logprobs": logprobs_object(choice.logprobs) if body.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage_object(answer.usage),
    }


async def _frames(stack: AsyncExitStack, answer: Answer, body: ChatBody, request: Request) -> AsyncGenerator[bytes]:
    """Server-sent events. A failure in the middle is an error frame, and then the stream ends without `[DONE]`."""
    head = _head(answer, body.model, "chat.completion.chunk")
    try:
        async with stack, aclosing(answer.deltas()) as deltas:
            for index in range(body.n or 1):
                yield sse(_chunk(head, body, index, {"role": "assistant", "content": "", "refusal": None}))
            async for delta in deltas:
                content = _delta_object(delta)
                if content or delta.logprobs:
                    yield sse(_chunk(head, body, delta.index, content, delta.logprobs))
                if delta.finish_reason is not None:
                    yield sse(_chunk(head, body, delta.index, {}, finish_reason=delta.finish_reason))
        if body.include_usage:
            yield sse({**head, "choices": [], "usage": usage_object(answer.usage)})
        yield SSE_END
    except Exception as error:  # noqa: BLE001 - a started stream says in its last frame what went wrong
        log_failure(error, request.url.path)
        yield sse(error_body(as_service_error(error)))


def _head(answer: Answer, name: str, kind: str) -> dict[str, object]:
    return {
        "id": answer.id,
        "object": kind,
        "created": int(answer.created_at),
        "model": name,
        "system_fingerprint": fingerprint(answer),
    }


def _chunk(
    head: dict[str, object],
    body: ChatBody,
    index: int,
    delta: dict[str, object],
    logprobs: Sequence[TokenLogprob] = (),
    finish_reason: str | None = None,
) -> dict[str, object]:
    choice: dict[str, object] = {
        "index": index,
        "delta": delta,
        "logprobs": logprobs_object(logprobs) if body.logprobs and logprobs else None,
        "finish_reason": finish_reason,
    }
    return {**head, "choices": [choice], **({"usage": None} if body.include_usage else {})}


def _delta_object(delta: Delta) -> dict[str, object]:
    content: dict[str, object] = {}
    if delta.text:
        content["content"] = delta.text
    if delta.reasoning:
        content["reasoning_content"] = delta.reasoning
    if delta.calls:
        content["tool_calls"] = [
            {
                "index": piece.index,
                **({"id": piece.id, "type": "function"} if piece.id else {}),
                "function": {
                    **({"name": piece.name} if piece.name is not None else {}),
                    "arguments": piece.arguments,
                },
            }
            for piece in delta.calls
        ]
    return content


def fingerprint(answer: Answer) -> str:
    """What stands for the weights that answered: equal weights have equal fingerprints."""
    content = (answer.model.content_id or answer.model.id).rpartition(":")[2]
    return f"fp_{content[:12]}"


def usage_object(usage: Usage) -> dict[str, object]:
    """OpenAI's `usage`: counts of token ids."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens, "audio_tokens": 0},
    }


def logprobs_object(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """OpenAI's `logprobs` of a chat answer."""

    def one(token: TokenLogprob) -> dict[str, object]:
        return {"token": token.text, "logprob": max(token.logprob, -9999.0), "bytes": list(token.bytes)}

    return {
        "content": [{**one(token), "top_logprobs": [one(other) for other in token.top]} for token in logprobs],
        "refusal": None,
    }
