"""Token streams as answers: deltas of text, reasoning and tool calls, with usage counted on the way."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gym_data import Tokenizer
from gym_serve.engines.base import Finish, Token, TokenStream
from gym_serve.inference.text import StopMatcher, TextDecoder
from gym_serve.inference.tokens import token_bytes
from gym_serve.inference.tool_json import CallPiece, JsonCalls
from gym_serve.inference.tools import Family, Piece, Said, ThinkSplitter, Thought, ToolParser

AnswerFinish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log-probability. `text` of part of a character has replacement characters; `bytes` has not."""

    id: int
    text: str
    bytes: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in one answer."""

    index: int
    """Which of the `n` answers."""
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: AnswerFinish | None = None
    """In the answer's last delta."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of token ids."""

    prompt_tokens: int
    completion_tokens: int
    """Stop tokens included, as they were generated."""
    reasoning_tokens: int
    cached_prompt_tokens: int
    """Of the prompt, those that were not read again."""


@dataclass(frozen=True, kw_only=True)
class ReaderSettings:
    """How an answer is read."""

    tokenizer: Tokenizer
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    thinks: bool = False
    starts_thinking: bool = False
    family: Family | None = None
    """Look for tool calls of this family."""
    forced_call: bool = False
    """The whole answer is the JSON of tool calls."""


class AnswerReader:
    """Reads one answer, token by token."""

    def __init__(self, index: int, settings: ReaderSettings) -> None:
        self.index: int = index
        self.num_tokens: int = 0
        self.num_reasoning_tokens: int = 0
        self.stopped: bool = False
        """Whether a stop string was found: no further token is wanted."""
        self._settings = settings
        # Markers of tool calls are special tokens in some families; stop ids never reach the decoder.
        skip_special = settings.family not in ("mistral", "llama")
        self._decoder = TextDecoder(lambda ids: settings.tokenizer.decode(ids, skip_special=skip_special))
        self._stop = StopMatcher(settings.stop)
        self._thinking = ThinkSplitter(starts_inside=settings.starts_thinking) if settings.thinks else None
        self._tools = ToolParser(settings.family) if settings.family else None
        self._forced = JsonCalls() if settings.forced_call else None
        self._num_calls = 0

    def push(self, token: Token) -> Delta | None:
        """What a token adds; None when nothing can be said yet."""
        self.num_tokens += 1
        logprobs = self._logprobs(token)
        text = "" if token.id in self._settings.stop_ids else self._decoder.push(token.id)
        sent, self.stopped = self._stop.push(text)
        delta = self._delta(self._pieces(sent), logprobs)
        if self._thinking is not None and self._thinking.is_inside:
            self.num_reasoning_tokens += 1
        if self.stopped:
            return replace(self._with_rest(delta), finish_reason="tool_calls" if self._num_calls else "stop")
        return delta if delta != Delta(self.index) else None

    def finish(self, finish: Finish) -> Delta:
        """The answer's last delta: what was held back, and why it ended."""
        sent, stopped = self._stop.push(self._decoder.flush())
        pieces = self._pieces(sent if stopped else sent + self._stop.flush())
        delta = self._with_rest(self._delta(pieces, ()))
        reason: AnswerFinish = "length" if finish.reason == "length" else "stop"
        return replace(delta, finish_reason="tool_calls" if reason == "stop" and self._num_calls else reason)

    def _with_rest(self, delta: Delta) -> Delta:
        """Add what the splitters still hold."""
        pieces: list[Piece] = []
        if self._thinking is not None:
            for piece in self._thinking.flush():
                pieces += self._tool_pieces(piece)
        if self._tools is not None:
            pieces += self._tools.flush()
        rest = self._delta(pieces, ())
        return replace(
            delta,
            text=delta.text + rest.text,
            reasoning=delta.reasoning + rest.reasoning,
            calls=delta.calls + rest.calls,
        )

    def _pieces(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._forced is not None:
            return list(self._forced.push(text))
        if self._thinking is None:
            return self._tool_pieces(Said(text))
        return [piece for part in self._thinking.push(text) for piece in self._tool_pieces(part)]

    def _tool_pieces(self, piece: Said | Thought) -> list[Piece]:
        if self._tools is None or isinstance(piece, Thought):
            return [piece]
        return self._tools.push(piece.text)

    def _delta(self, pieces: Sequence[Piece], logprobs: tuple[TokenLogprob, ...]) -> Delta:
        calls = [piece for piece in pieces if isinstance(piece, CallPiece)]
        named = [replace(call, id=f"call_{uuid.uuid4().hex[:24]}") if call.name is not None else call for call in calls]
        self._num_calls = max([self._num_calls, *(call.index + 1 for call in calls)])
        return Delta(
            self.index,
            "".join(piece.text for piece in pieces if isinstance(piece, Said)),
            "".join(piece.text for piece in pieces if isinstance(piece, Thought)),
            tuple(named),
            logprobs,
        )

    def _logprobs(self, token: Token) -> tuple[TokenLogprob, ...]:
        if token.logprob is None:
            return ()
        top = tuple(self._token_logprob(id_, value) for id_, value in token.top)
        return (replace(self._token_logprob(token.id, token.logprob), top=top),)

    def _token_logprob(self, token_id: int, logprob: float) -> TokenLogprob:
        raw = token_bytes(self._settings.tokenizer, token_id)
        return TokenLogprob(token_id, raw.decode("utf-8", errors="replace"), raw, logprob)


class AnswerStream:
    """The answers to one request, as deltas. Iterate once, in a thread or on an event loop.

    Leaving the iteration early (a client that went away) aborts what is still being generated.
    """

    def __init__(
        self, streams: Sequence[TokenStream], settings: ReaderSettings, *, before: Sequence[Delta] = ()
    ) -> None:
        self.num_prompt_tokens: int = len(streams[0].request.prompt_ids)
        self._streams = streams
        self._readers = [AnswerReader(i, settings) for i in range(len(streams))]
        self._before = before

    @property
    def usage(self) -> Usage:
        """Counts so far; exact at the end."""
        return Usage(
            self.num_prompt_tokens,
            sum(reader.num_tokens for reader in self._readers),
            sum(reader.num_reasoning_tokens for reader in self._readers),
            # The prompt is counted once, however many answers it gets: what the others save is not the caller's.
            self._streams[0].num_cached_tokens,
        )

    @property
    def cut_short(self) -> bool:
        """Whether an answer was ended from outside, by `abort` or a closing engine, before it was complete."""
        pairs = zip(self._streams, self._readers, strict=True)
        return any(s.finish is not None and s.finish.reason == "abort" and not r.stopped for s, r in pairs)

    def abort(self) -> None:
        """Stop generating."""
        for stream in self._streams:
            if stream.finish is None:
                stream.abort()

    def __iter__(self) -> Iterator[Delta]:
        try:
            yield from self._before
            for stream, reader in zip(self._streams, self._readers, strict=True):
                for token in stream:
                    delta = reader.push(token)
                    if delta is not None:
                        yield delta
                    if reader.stopped:
                        stream.abort()
                        break
                else:
                    assert stream.finish is not None
                    yield reader.finish(stream.finish)
        finally:
            self.abort()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            for delta in self._before:
                yield delta
            if len(self._streams) == 1:
                async for delta in self._read(0):
                    yield delta
                return
            arrived: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()
            tasks = [asyncio.create_task(self._pump(i, arrived.put_nowait)) for i in range(len(self._streams))]
            try:
                open_answers = len(tasks)
                while open_answers:
                    item = await arrived.get()
                    if isinstance(item, BaseException):
                        raise item
                    if item is None:
                        open_answers -= 1
                    else:
                        yield item
            finally:
                for task in tasks:
                    task.cancel()
        finally:
            self.abort()

    async def _pump(self, index: int, put: Callable[[Delta | BaseException | None], None]) -> None:
        try:
            async for delta in self._read(index):
                put(delta)
            put(None)
        except Exception as error:  # noqa: BLE001  (raised again where the deltas are read)
            put(error)

    async def _read(self, index: int) -> AsyncIterator[Delta]:
        stream, reader = self._streams[index], self._readers[index]
        async for token in stream:
            delta = reader.push(token)
            if delta is not None:
                yield delta
            if reader.stopped:
                stream.abort()
                return
        assert stream.finish is not None
        yield reader.finish(stream.finish)
