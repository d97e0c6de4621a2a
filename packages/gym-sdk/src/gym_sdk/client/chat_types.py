"""Messages, answers and their pieces. Inputs may also be dicts as the `openai` client takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypedDict


class ChatOptions(TypedDict, total=False):
    """How to answer; what is left out takes the model's own defaults. Names and meanings are those of OpenAI's API."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    max_tokens: int | None
    n: int | None
    seed: int | None
    stop: str | Sequence[str]
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    top_logprobs: int | None
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    response_format: Mapping[str, Any] | None
    template_variables: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call that the model wants made."""

    id: str
    name: str
    arguments_json: str
    """As the model wrote it; not always valid JSON."""


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    """One turn."""

    role: str
    """`system`, `developer`, `user`, `assistant` or `tool`."""
    text: str = ""
    name: str = ""
    tool_call_id: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token and the logarithm of its probability."""

    token: str
    token_bytes: bytes
    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    """The most likely tokens at this place, most likely first."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Counts of token ids, in and out."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, kw_only=True)
class ChatChoice:
    """One answer."""

    index: int
    message: ChatMessage
    finish_reason: str | None
    """`stop`, `length` or `tool_calls`."""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChatCompletion:
    """The answer, or the answers, to a chat."""

    id: str
    model: str
    """The exact version that answered."""
    create_time: datetime | None
    choices: tuple[ChatChoice, ...]
    usage: Usage | None

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.choices[0].message.text if self.choices else ""


@dataclass(frozen=True, kw_only=True)
class ToolCallDelta:
    """A piece of a tool call."""

    index: int
    id: str = ""
    """In the call's first piece."""
    name: str = ""
    arguments_json: str = ""
    """To be appended."""


@dataclass(frozen=True, kw_only=True)
class ChatDelta:
    """A piece of one answer."""

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: str | None = None
    """In the last piece."""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChatChunk:
    """What arrived at once."""

    id: str
    model: str
    choices: tuple[ChatDelta, ...]
    usage: Usage | None = None
    """In the last chunk."""

    @property
    def text(self) -> str:
        """What the first answer grew by."""
        return "".join(choice.text for choice in self.choices if choice.index == 0)


@dataclass
class ChatCollector:
    """Puts the pieces of a stream together."""

    _texts: dict[int, list[str]] = field(default_factory=dict)
    _reasonings: dict[int, list[str]] = field(default_factory=dict)
    _tool_calls: dict[int, dict[int, dict[str, str]]] = field(default_factory=dict)
    _finish_reasons: dict[int, str | None] = field(default_factory=dict)
    _logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    _last: ChatChunk | None = None
    _usage: Usage | None = None

    def add(self, chunk: ChatChunk) -> None:
        """Take the next piece."""
        self._last = chunk
        self._usage = chunk.usage or self._usage
        for delta in chunk.choices:
            self._texts.setdefault(delta.index, []).append(delta.text)
            self._reasonings.setdefault(delta.index, []).append(delta.reasoning)
            self._logprobs.setdefault(delta.index, []).extend(delta.logprobs)
            self._finish_reasons[delta.index] = delta.finish_reason or self._finish_reasons.get(delta.index)
            calls = self._tool_calls.setdefault(delta.index, {})
            for piece in delta.tool_calls:
                call = calls.setdefault(piece.index, {"id": "", "name": "", "arguments_json": ""})
                call["id"] = call["id"] or piece.id
                call["name"] = call["name"] or piece.name
                call["arguments_json"] += piece.arguments_json

    def completion(self) -> ChatCompletion:
        """The answer so far."""
        choices = []
        for index in sorted(self._texts):
            calls = tuple(ToolCall(**call) for _, call in sorted(self._tool_calls[index].items()))
            message = ChatMessage(
                role="assistant",
                text="".join(self._texts[index]),
                reasoning="".join(self._reasonings[index]),
                tool_calls=calls,
            )
            choices.append(
                ChatChoice(
                    index=index,
                    message=message,
                    finish_reason=self._finish_reasons[index],
                    logprobs=tuple(self._logprobs[index]),
                )
            )
        return ChatCompletion(
            id=self._last.id if self._last else "",
            model=self._last.model if self._last else "",
            create_time=None,
            choices=tuple(choices),
            usage=self._usage,
        )
