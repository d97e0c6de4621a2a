"""The canonical form of a row: every format converts to it without loss, and back.

JSON that belongs to the user (tool schemas, call arguments, whatever else a row held) stays JSON text, so that no value
ever changes its type on the way. Named tuples, because a row is a dozen of them: they cannot be changed either, and are
made in a quarter of the time of a frozen dataclass.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "developer", "user", "assistant", "tool")

PartType = Literal["text", "reasoning", "image", "audio", "video", "tool_call", "refusal"]
MEDIA_TYPES: tuple[PartType, ...] = ("image", "audio", "video")

RecordKind = Literal["text", "chat", "preference", "unpaired", "prompt", "stepwise", "tokens"]


class ToolCall(NamedTuple):
    """A call that the assistant makes. `arguments_json` is JSON text, as the row had it or dumped from its object."""

    name: str
    arguments_json: str
    id: str | None = None


class Part(NamedTuple):
    """A piece of a message: text, reasoning and refusal have `text`; media a path, URL or data URI; calls a `call`."""

    type: PartType
    text: str | None = None
    media: str | None = None
    call: ToolCall | None = None


class Message(NamedTuple):
    """One turn. `train` overrides which turns are trained; `weight` 0 leaves an assistant's turn untrained."""

    role: Role
    parts: tuple[Part, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    train: bool | None = None
    weight: float | None = None

    @property
    def text(self) -> str:
        """The text parts, one after another."""
        return "".join(part.text or "" for part in self.parts if part.type == "text")

    @property
    def reasoning(self) -> str | None:
        """The reasoning parts, one after another; None when there is none."""
        found = [part.text or "" for part in self.parts if part.type == "reasoning"]
        return "".join(found) if found else None

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls, in order."""
        return tuple(part.call for part in self.parts if part.call is not None)


class Candidate(NamedTuple):
    """A continuation of the prompt, with what is known about its worth: rank 0 is best; a label is good or bad."""

    messages: tuple[Message, ...]
    rank: int | None = None
    label: bool | None = None
    score: float | None = None


class Source(NamedTuple):
    """Where a record came from. `row` counts from 1; for line-based files it is the line number."""

    uri: str
    format: str
    row: int
    sha256: str | None = None


class Record(NamedTuple):
    """One row. A chat is `prompt` and the one candidate that ends it; `messages` is the whole of it."""

    kind: RecordKind
    prompt: tuple[Message, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    id: str | None = None
    tools_json: str | None = None
    reward_json: str | None = None
    meta_json: str | None = None
    weight: float | None = None
    source: Source | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt and its first candidate."""
        return self.prompt + self.candidates[0].messages if self.candidates else self.prompt


def text_message(role: Role, text: str) -> Message:
    """A message of one text part."""
    return Message(role, (Part("text", text),))
