"""Answers to clients: the model is found and pinned, the engine made ready, the answer watched until its end.

Both interfaces go through `Generation.open`. Whoever leaves the block, by its end, an error, a deadline or a client
that went away, ends the generation with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import cast

from gym_sdk.errors import UserError
from gym_serve.call import Call
from gym_serve.catalog import Catalog, Model
from gym_serve.engines.base import EngineError, PromptTooLong
from gym_serve.errors import Reason, ServiceError
from gym_serve.inference import ChatRequest, CompletionRequest, Delta, Usage
from gym_serve.inference.answers import AnswerStream
from gym_serve.metrics import Metrics
from gym_serve.serving import Ready, Serving
from gym_serve.settings import Settings

logger: logging.Logger = logging.getLogger(__name__)


class Answer:
    """An answer that is under way. Iterate its deltas once."""

    def __init__(self, model: Model, prefix: str, stream: AnswerStream, metrics: Metrics, arrived: float) -> None:
        """`arrived` is when the request came, on `time.monotonic()`'s clock."""
        self.id: str = f"{prefix}-{uuid.uuid4().hex}"
        self.created_at: float = time.time()
        self.model: Model = model
        """The version that answers, whatever its name comes to mean meanwhile."""
        self._stream = stream
        self._metrics = metrics
        self._arrived = arrived
        self._timed_out = False

    @property
    def usage(self) -> Usage:
        """Counts of token ids; exact at the end."""
        return self._stream.usage

    async def deltas(self) -> AsyncGenerator[Delta]:
        """The answer as it comes. Raises `ServiceError` for an answer that the deadline or the engine cut short."""
        first: float | None = None
        async with aclosing(cast("AsyncGenerator[Delta]", aiter(self._stream))) as deltas:
            async for delta in deltas:
                if first is None:
                    first = time.monotonic()
                    self._metrics.first_token_seconds.observe(first - self._arrived)
                yield delta
        num_tokens = self.usage.completion_tokens
        if self._timed_out:
            raise ServiceError(
                Reason.TIMED_OUT,
                f"the answer was not complete in time; {num_tokens} tokens were generated",
                hint="allow more time, or ask for fewer tokens",
            )
        if self._stream.cut_short:
            raise EngineError("it was stopped in the middle of the answer")
        if first is not None and num_tokens > 1:
            self._metrics.token_seconds.observe((time.monotonic() - first) / (num_tokens - 1))

    def time_out(self) -> None:
        """The deadline has come."""
        self._timed_out = True
        self._stream.abort()


class Generation:
    """What the two interfaces call to generate."""

    def __init__(self, catalog: Catalog, serving: Serving, metrics: Metrics, settings: Settings) -> None:
        self._catalog = catalog
        self._serving = serving
        self._metrics = metrics
        self._max_waiting = settings.engine.max_waiting
        self._max_request_s = settings.limits.max_request_s

    async def tokenize(self, call: Call, name: str, request: ChatRequest) -> tuple[Model, list[int], str]:
        """The model, the prompt's ids and its text, special tokens included."""
        model = self._catalog.get(call.key, name)
        ready = await self._serving.use(model)
        try:
            ids = await asyncio.to_thread(ready.chat_model.tokenize, request)
            return model, ids, ready.chat_model.tokenizer.decode(ids)
        finally:
            ready.release()

    @asynccontextmanager
    async def open(self, call: Call, name: str, request: ChatRequest | CompletionRequest) -> AsyncIterator[Answer]:
        """Starts an answer and ends it with the block.

        Raises `ServiceError` for a model that is not there, a prompt that is too long (with both numbers), a full queue
        and an engine that failed.
        """
        arrived = time.monotonic()
        model = self._catalog.get(call.key, name)
        if self._serving.stats().num_waiting >= self._max_waiting:
            raise ServiceError(
                Reason.QUEUE_FULL, f"{self._max_waiting} requests wait for an engine already", retry_after_s=1.0
            )
        try:
            ready = await self._serving.use(model)
        except EngineError as error:
            raise _engine_down(error) from error
        stream: AnswerStream | None = None
        timer: asyncio.TimerHandle | None = None
        try:
            stream = await _start(ready, request)
            prefix = "chatcmpl" if isinstance(request, ChatRequest) else "cmpl"
            answer = Answer(model, prefix, stream, self._metrics, arrived)
            left_s = self._max_request_s
            if call.deadline is not None:
                left_s = min(left_s, call.deadline - time.monotonic())
            timer = asyncio.get_running_loop().call_later(max(0.0, left_s), answer.time_out)
            yield answer
        except EngineError as error:
            await self._serving.failed(ready, error)
            raise _engine_down(error) from error
        except (asyncio.CancelledError, GeneratorExit):
            self._metrics.aborted.inc()
            num_tokens = stream.usage.completion_tokens if stream is not None else 0
            logger.info("client went away after %d tokens: generation aborted", num_tokens)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if stream is not None:
                stream.abort()
                self._metrics.prompt_tokens.inc(stream.usage.prompt_tokens)
                self._metrics.generated_tokens.inc(stream.usage.completion_tokens)
            ready.release()

    @asynccontextmanager
    async def deltas(
        self, call: Call, name: str, request: ChatRequest | CompletionRequest
    ) -> AsyncIterator[tuple[Answer, AsyncGenerator[Delta]]]:
        """`open`, with the answer's deltas, which end with the block however it is left."""
        async with self.open(call, name, request) as answer, aclosing(answer.deltas()) as deltas:
            yield answer, deltas


def _engine_down(error: EngineError) -> ServiceError:
    return ServiceError(
        Reason.ENGINE_DOWN,
        f"the engine failed: {error.message}",
        hint="send the request again",
        retry_after_s=1.0,
    )


async def _start(ready: Ready, request: ChatRequest | CompletionRequest) -> AnswerStream:
    def start() -> AnswerStream:
        if isinstance(request, ChatRequest):
            return ready.chat_model.chat(request)
        return ready.chat_model.complete(request)

    try:
        # Rendering a long chat or compiling a grammar must not hold up the others' tokens; a short one takes less time
        # than the way to a thread and back on a busy machine.
        if request.is_short and ready.chat_model.experiences is None:
            return start()
        return await _in_thread(start)
    except PromptTooLong as error:
        raise ServiceError(Reason.CONTEXT_TOO_LONG, error.message, field="messages", hint=error.hint) from None
    except UserError as error:
        raise ServiceError(
            Reason.REQUEST_INVALID, error.message, field=error.where.path if error.where else None, hint=error.hint
        ) from None


async def _in_thread(start: Callable[[], AnswerStream]) -> AnswerStream:
    starting = asyncio.ensure_future(asyncio.to_thread(start))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # The thread cannot be stopped; what it starts must not go on without a reader.
        starting.add_done_callback(lambda task: None if task.exception() else task.result().abort())
        raise
