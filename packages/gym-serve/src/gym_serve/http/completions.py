"""OpenAI's `/v1/completions`, whole and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gym_serve.errors import as_service_error, invalid
from gym_serve.generation import Answer, Generation
from gym_serve.http.chat import fingerprint, usage_object
from gym_serve.http.disconnect import until_disconnect
from gym_serve.http.errors import SSE_END, error_body, read_body, sse
from gym_serve.http.gateway import call_of, log_failure
from gym_serve.http.messages import CompletionBody
from gym_serve.http.streams import SSE_HEADERS, GuardedStream
from gym_serve.inference import Usage
from gym_serve.inference.answers import TokenLogprob
from gym_serve.limits import StreamLimiter

_MAX_PROMPTS = 128


def completion_routes(generation: Generation, streams: StreamLimiter) -> list[Route]:
    """The routes."""

    async def create(request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        prompts = body.prompts()
        if len(prompts) > _MAX_PROMPTS:
            raise invalid(f"at most {_MAX_PROMPTS} prompts a call", field="prompt")
        if not body.stream:
            with streams.hold(call_of(request).key):
                return JSONResponse(await until_disconnect(request.receive, _whole(generation, request, body)))
        if len(prompts) > 1:
            raise invalid("a stream continues one prompt; send several calls", field="prompt")
        async with AsyncExitStack() as stack:
            stack.enter_context(streams.hold(call_of(request).key))
            opened = generation.open(call_of(request), body.model, body.to_request(prompts[0]))
            answer = await stack.enter_async_context(opened)
            entered = stack.pop_all()
        frames = _frames(entered, answer, body, request)
        return GuardedStream(frames, media_type="text/event-stream", headers=SSE_HEADERS, stack=entered)

    return [Route("/v1/completions", create, methods=["POST"])]


@dataclass(kw_only=True)
class _Choice:
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


async def _whole(generation: Generation, request: Request, body: CompletionBody) -> dict[str, object]:
    async def continue_one(prompt: str | list[int]) -> tuple[Answer, list[_Choice]]:
        choices = [_Choice() for _ in range(body.n or 1)]
        async with generation.deltas(call_of(request), body.model, body.to_request(prompt)) as (answer, deltas):
            async for delta in deltas:
                choice = choices[delta.index]
                choice.text += delta.text
                choice.logprobs += delta.logprobs
                choice.finish_reason = delta.finish_reason or choice.finish_reason
        return answer, choices

    try:
        async with asyncio.TaskGroup() as group:  # one that fails ends the others
            tasks = [group.create_task(continue_one(prompt)) for prompt in body.prompts()]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    answers = [task.result() for task in tasks]
    choices = [choice for _, each in answers for choice in each]
    usages = [answer.usage for answer, _ in answers]
    return {
        **_head(answers[0][0], body.model),
        "choices": [
            {
                "index": index,
                "text": choice.text,
                "logprobs": _logprobs(choice.logprobs) if body.logprobs is not None else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage_object(
            Usage(
                sum(usage.prompt_tokens for usage in usages),
                sum(usage.completion_tokens for usage in usages),
                sum(usage.reasoning_tokens for usage in usages),
                sum(usage.cached_prompt_tokens for usage in usages),
            )
        ),
    }


async def _frames(
    stack: AsyncExitStack, answer: Answer, body: CompletionBody, request: Request
) -> AsyncGenerator[bytes]:
    head = _head(answer, body.model)
    no_usage = {"usage": None} if body.include_usage else {}
    try:
        async with stack, aclosing(answer.deltas()) as deltas:
            async for delta in deltas:
                choice = {
                    "index": delta.index,
                    "text": delta.text,
                    "logprobs": _logprobs(delta.logprobs) if body.logprobs is not None else None,
                    "finish_reason": delta.finish_reason,
                }
                yield sse({**head, "choices": [choice], **no_usage})
        if body.include_usage:
            yield sse({**head, "choices": [], "usage": usage_object(answer.usage)})
        yield SSE_END
    except Exception as error:  # noqa: BLE001 - a started stream says in its last frame what went wrong
        log_failure(error, request.url.path)
        yield sse(error_body(as_service_error(error)))


def _head(answer: Answer, name: str) -> dict[str, object]:
    return {
        "id": answer.id,
        "object": "text_completion",
        "created": int(answer.created_at),
        "model": name,
        "system_fingerprint": fingerprint(answer),
    }


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, object]:
    """OpenAI's older form of log-probabilities."""
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [max(token.logprob, -9999.0) for token in tokens],
        "top_logprobs": [{other.text: max(other.logprob, -9999.0) for other in token.top} for token in tokens],
        "text_offset": _offsets(tokens),
    }


def _offsets(tokens: Sequence[TokenLogprob]) -> list[int]:
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token.text)
    return offsets
