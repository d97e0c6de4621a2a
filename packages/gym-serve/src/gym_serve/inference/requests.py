"""What a client asks for, in Gym's own words: the HTTP and gRPC surfaces translate into these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gym_data.record import Message

_SHORT_CHARACTERS = 2_000
_FEW_MESSAGES = 8


@dataclass(frozen=True, kw_only=True)
class ResponseFormat:
    """What form the answer must have."""

    kind: Literal["text", "json_object", "json_schema", "lark"] = "text"
    schema_json: str | None = None
    """For `json_schema`: the schema, as text."""
    lark: str | None = None
    """For `lark`: a grammar in llguidance's dialect of Lark."""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """Settings that chat and completions share."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams` that the client gave. What is not given takes the model's own defaults."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    """Strings that end the answer; no part of them is sent."""
    n: int = 1
    """Answers to the same prompt. With a seed, answer i draws with seed + i."""
    top_logprobs: int | None = None
    response_format: ResponseFormat = ResponseFormat()


@dataclass(frozen=True, kw_only=True)
class ChatRequest(GenerationSettings):
    """A chat to be answered."""

    messages: Sequence[Message]
    tools_json: str | None = None
    """A JSON list of tools as OpenAI writes them: `[{"type": "function", "function": {...}}]`."""
    tool_choice: str = "auto"
    """`auto`, `none`, `required`, or the name of the one tool that must be called."""
    parallel_tool_calls: bool = True
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as `enable_thinking`."""

    @property
    def is_short(self) -> bool:
        """Whether its prompt is made in a millisecond or two."""
        if self.tools_json is not None or self.response_format.kind != "text" or len(self.messages) > _FEW_MESSAGES:
            return False
        return sum(len(part.text or "") for message in self.messages for part in message.parts) <= _SHORT_CHARACTERS


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(GenerationSettings):
    """A text to be continued. Text of special tokens stays text; give ids to use them."""

    prompt: str | Sequence[int]
    echo: bool = False
    """Give the prompt back before the answer."""

    @property
    def is_short(self) -> bool:
        """As of a chat."""
        return self.response_format.kind == "text" and len(self.prompt) <= _SHORT_CHARACTERS
