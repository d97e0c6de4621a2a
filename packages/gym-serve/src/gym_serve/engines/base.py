"""What an engine is: token ids in, a stream of token ids out.

Text, messages, stop strings and tools are the business of `gym_serve.inference`; queues between users are the daemon's.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from gym_sdk.errors import GymError, UserError

FinishReason = Literal["stop", "length", "abort"]


class EngineError(GymError):
    """The engine failed while it worked on a request. The request may be sent again."""


class RequestRefused(UserError):
    """A request that no engine state could serve: too long, an unknown adapter, a setting out of range."""


class PromptTooLong(RequestRefused):
    """The prompt leaves no room in the context."""

    def __init__(self, num_prompt_tokens: int, context_length: int) -> None:
        super().__init__(
            f"the prompt has {num_prompt_tokens} tokens; the context holds {context_length}, the answer included",
            hint="shorten the prompt: nothing is cut silently",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.context_length = context_length


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn. The defaults change nothing about the model's distribution."""

    temperature: float = 1.0
    """0 takes the likeliest token; above, logits are divided by it."""

    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities first add up to this (nucleus sampling, arXiv 1904.09751)."""

    top_k: int = 0
    """Keep so many of the likeliest tokens; 0 keeps all."""

    min_p: float = 0.0
    """Keep tokens with at least this share of the likeliest one's probability (arXiv 2407.01082)."""

    repetition_penalty: float = 1.0
    """Divide positive logits of tokens in the prompt or answer by this, multiply negative ones (arXiv 1909.05858)."""

    presence_penalty: float = 0.0
    """Subtract this from the logit of every token that is in the answer so far (OpenAI's definition)."""

    frequency_penalty: float = 0.0
    """Subtract this times the number of times that a token is in the answer so far (OpenAI's definition)."""

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Add to the logits of these token ids."""

    seed: int | None = None
    """Fixes the draws of this request, whatever else is in the batch. Drawn afresh when None."""

    def __post_init__(self) -> None:
        ranges: tuple[tuple[str, float, float, float], ...] = (
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("top_k", self.top_k, 0, 2**31),
            ("repetition_penalty", self.repetition_penalty, 0.01, 100.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
        )
        for name, value, low, high in ranges:
            if not low <= value <= high:  # also refuses NaN
                raise RequestRefused(f"{name} is {value}; it lies between {low:g} and {high:g}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken; temperatures too small to divide by count as 0."""
        return self.temperature < 1e-5 or self.top_k == 1


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One answer to one prompt."""

    prompt_ids: Sequence[int]

    max_tokens: int | None = None
    """The most tokens to generate; what is left of the context when None."""

    stop_ids: frozenset[int] = frozenset()
    """Ids that end the answer. The stop id is the last token of the stream, and counted."""

    adapter: str | None = None
    """The content id of a loaded adapter; None for the base model. Pinned when the request is submitted."""

    sampling: SamplingParams = SamplingParams()

    top_logprobs: int | None = None
    """Report each token's log-probability under the model's own distribution, and so many alternatives."""

    grammar: str | None = None
    """A Lark grammar, or a JSON Schema (text that starts with `{`), that the answer must satisfy."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)


def check_request(request: GenerationRequest, *, context_length: int, vocab_size: int) -> None:
    """Refuse what no engine with these limits could serve. Raises RequestRefused or PromptTooLong, and MissingExtra
    for a grammar where llguidance is not installed."""
    num_prompt_tokens = len(request.prompt_ids)
    if num_prompt_tokens == 0:
        raise RequestRefused("the prompt is empty", hint="give at least one token")
    if num_prompt_tokens >= context_length:
        raise PromptTooLong(num_prompt_tokens, context_length)
    if request.max_tokens is not None and request.max_tokens < 1:
        raise RequestRefused(f"max_tokens is {request.max_tokens}; it is at least 1")
    wrong = next((i for i in (*request.prompt_ids, *request.sampling.logit_bias) if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise RequestRefused(f"token id {wrong} is not in the vocabulary of {vocab_size}")
    if request.grammar is not None:
        from gym_serve.engines.grammar import check_grammar

        check_grammar(request.grammar)


def check_adapter(adapter: str | None, loaded: Container[str]) -> None:
    """Refuse an adapter that is not among the loaded ones. For engines, under the lock that pins it."""
    if adapter is not None and adapter not in loaded:
        raise RequestRefused(f"no adapter {adapter} is loaded")


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token."""

    id: int
    logprob: float | None = None
    """The natural log of its probability before temperature and penalties, when asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest ids and their log-probabilities, likeliest first."""


@dataclass(frozen=True, slots=True)
class PromptRead:
    """The prompt has been read. Comes before the first token, where the engine has something to say."""

    num_cached_tokens: int
    """Tokens of the prompt that were not read again, because another request had begun with them."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a stream ended."""

    reason: FinishReason
    num_prompt_tokens: int
    num_tokens: int


StreamItem = PromptRead | Token | Finish | GymError
"""What happens to a request. Finish or an error comes last."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A whole answer."""

    token_ids: list[int]
    tokens: list[Token]
    finish: Finish


class TokenStream:
    """The tokens of one request, as they come. Iterate once, in a thread or (`async for`) on an event loop.

    Iteration ends when the request does, and then `finish` is set; it raises the EngineError of a failed engine.
    """

    def __init__(self, request: GenerationRequest, abort: Callable[[str], None]) -> None:
        self.request = request
        self.finish: Finish | None = None
        self.num_cached_tokens: int = 0
        """See `PromptRead`; known when the first token is."""
        self._abort = abort
        self._items: deque[StreamItem] = deque()
        self._ready = threading.Condition()
        self._wake: Callable[[], object] | None = None
        self._forward: Callable[[Sequence[StreamItem]], None] | None = None

    def abort(self) -> None:
        """Stop generating within a step. The stream then ends with reason `abort`."""
        self._abort(self.request.id)

    def put(self, items: Iterable[StreamItem]) -> None:
        """For engines: append what happened. Finish or an error comes last."""
        with self._ready:
            if self._forward is not None:
                self._forward(list(items))
                return
            self._items.extend(items)
            self._ready.notify_all()
            wake = self._wake
        if wake is not None:
            wake()

    def forward(self, receive: Callable[[Sequence[StreamItem]], None]) -> None:
        """For engines behind a connection: pass everything on as it comes, in place of iteration."""
        with self._ready:
            self._forward = receive
            if self._items:
                receive(list(self._items))
                self._items.clear()

    def _take(self) -> list[Token]:
        """What has come, without the end marker, which sets `finish` or raises."""
        tokens: list[Token] = []
        while self._items:
            item = self._items.popleft()
            if isinstance(item, Token):
                tokens.append(item)
            elif isinstance(item, PromptRead):
                self.num_cached_tokens = item.num_cached_tokens
            elif isinstance(item, Finish):
                self.finish = item
            elif tokens:
                self._items.appendleft(item)  # the tokens first
                break
            else:
                raise item
        return tokens

    def __iter__(self) -> Iterator[Token]:
        while self.finish is None:
            with self._ready:
                self._ready.wait_for(lambda: self._items)
                tokens = self._take()
            yield from tokens

    async def __aiter__(self) -> AsyncIterator[Token]:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        with self._ready:
            self._wake = partial(loop.call_soon_threadsafe, arrived.set)
        try:
            while self.finish is None:
                arrived.clear()
                with self._ready:
                    tokens = self._take()
                for token in tokens:
                    yield token
                if not tokens and self.finish is None:
                    await arrived.wait()
        finally:
            with self._ready:
                self._wake = None

    def completion(self) -> Completion:
        """Wait for the end and return the whole answer."""
        tokens = list(self)
        assert self.finish is not None
        return Completion(token_ids=[token.id for token in tokens], tokens=tokens, finish=self.finish)


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A moment of an engine, and its counts since the start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_reused_tokens: int = 0
    """Prompt tokens that were not read again, because another request had begun with them."""
    num_restarts: int = 0


class Engine(Protocol):
    """Runs many requests at once on one base model and its adapters.

    Invariants, which every engine keeps and `tests/test_engine_contract.py` checks:

    - A request's tokens depend on its prompt, adapter, sampling and seed only, never on its neighbours in the batch
      (up to the rounding of a batched sum: with greedy choice and float32, token for token).
    - The adapter is pinned by content id at `submit`. It stays until the request ends, even if it is unloaded
      meanwhile; the same name loaded again with other weights is another id, and another adapter.
    - A stream ends once: with `Finish`, or by raising an EngineError. No token comes after the end.
    - `abort` of a request that ended, or never was, does nothing. An abort takes effect within one step.
    - `submit` never blocks on generation. What can be refused is refused there (RequestRefused), not in the stream.
    - `len(prompt_ids) + generated <= context_length`; a prompt that fills the context is refused, none is cut.
    - After `close`, every open stream has ended.
    """

    @property
    def context_length(self) -> int:
        """The most tokens of a prompt and its answer together."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def adapters(self) -> frozenset[str]:
        """The content ids that requests may name."""
        ...

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Queue a request, first come first served."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request early."""
        ...

    def load_adapter(self, folder: Path) -> str:
        """Load an adapter and return its content id. Raises ModelError if it does not fit the model."""
        ...

    def unload_adapter(self, adapter: str) -> None:
        """Forget an adapter once the last request that uses it has ended."""
        ...

    def stats(self) -> EngineStats:
        """Counts for metrics."""
        ...

    def close(self) -> None:
        """End every stream (reason `abort`) and give the memory back."""
        ...


def generate_all(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Completion]:
    """Answer every request and return the completions in the order of the requests.

    The longest start first, so that the batch stays full to the end instead of waiting for one late long answer.
    `on_progress(done, total)` is called as they end.

    Raises:
        EngineError: the engine failed; requests that were running are aborted.
    """
    order = sorted(range(len(requests)), key=lambda i: _expected_length(requests[i]), reverse=True)
    streams = {i: engine.submit(requests[i]) for i in order}
    done: dict[int, Completion] = {}
    try:
        for count, i in enumerate(order, start=1):
            done[i] = streams[i].completion()
            if on_progress is not None:
                on_progress(count, len(requests))
    except BaseException:
        for stream in streams.values():
            stream.abort()
        raise
    return [done[i] for i in range(len(requests))]


def _expected_length(request: GenerationRequest) -> int:
    return len(request.prompt_ids) + (request.max_tokens or 0)
