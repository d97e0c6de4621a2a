"""Messages in the shape that chat templates read: transformers' dictionaries, plain or traced."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gym_data.record import MEDIA_TYPES, Message, Part, ToolCall
from gym_data.rendering.traced import CALL, CONTENT, OTHER, OUTSIDE, REASONING, ROLE, origin, wrap

Wrap = Callable[[Any, int, int], Any]


@dataclass(frozen=True, slots=True)
class Conventions:
    """How a template wants what different templates want differently; found by probing it."""

    arguments: Literal["object", "text"] = "object"
    """Call arguments as an object (Qwen, Llama) or as JSON text (DeepSeek)."""
    empty_content: Literal["missing", "empty", "none"] = "missing"
    """The content of a message without any."""
    developer: Literal["developer", "system"] = "system"
    """The role under which a developer message is rendered: templates that do not know it would leave it out."""


def plain_messages(messages: Sequence[Message], how: Conventions) -> list[dict[str, Any]]:
    """The messages as transformers' `apply_chat_template` would take them."""
    return _convert(messages, how, lambda value, index, field: value)


def traced_messages(messages: Sequence[Message], how: Conventions) -> list[dict[str, Any]]:
    """The same with every string traced to its message and field."""
    return _convert(messages, how, lambda value, index, field: wrap(value, origin(index, field)))


def plain_tools(tools_json: str | None) -> list[Any] | None:
    """The tool schemas for a template."""
    return json.loads(tools_json) if tools_json else None


def traced_tools(tools_json: str | None) -> list[Any] | None:
    """The same, traced to outside of any message."""
    return wrap(json.loads(tools_json), OUTSIDE) if tools_json else None


def _convert(messages: Sequence[Message], how: Conventions, wrapped: Wrap) -> list[dict[str, Any]]:
    converted = []
    for index, message in enumerate(messages):
        role = how.developer if message.role == "developer" else message.role
        item: dict[str, Any] = {"role": wrapped(role, index, ROLE)}
        content = _content(message.parts)
        if content is not None:
            item["content"] = wrapped(content, index, CONTENT)
        elif how.empty_content != "missing":
            item["content"] = wrapped("", index, CONTENT) if how.empty_content == "empty" else None
        if (reasoning := message.reasoning) is not None:
            # Templates read reasoning under either name; transformers fills both.
            item["reasoning_content"] = item["thinking"] = wrapped(reasoning, index, REASONING)
        if message.name is not None:
            item["name"] = wrapped(message.name, index, OTHER)
        if message.tool_call_id is not None:
            item["tool_call_id"] = wrapped(message.tool_call_id, index, OTHER)
        if calls := message.calls:
            item["tool_calls"] = [
                {
                    "type": "function",
                    **({"id": wrapped(call.id, index, OTHER)} if call.id is not None else {}),
                    "function": {
                        "name": wrapped(call.name, index, CALL + number),
                        "arguments": wrapped(_arguments(call, how), index, CALL + number),
                    },
                }
                for number, call in enumerate(calls)
            ]
        converted.append(item)
    return converted


def _content(parts: Sequence[Part]) -> str | list[dict[str, str]] | None:
    """Text as one string; a list of typed parts only where there is media."""
    said = [part for part in parts if part.type in ("text", "refusal") or part.type in MEDIA_TYPES]
    if any(part.type in MEDIA_TYPES for part in said):
        return [
            {"type": part.type, part.type: part.media or ""}
            if part.type in MEDIA_TYPES
            else {"type": "text", "text": part.text or ""}
            for part in said
        ]
    return "".join(part.text or "" for part in said) if said else None


def _arguments(call: ToolCall, how: Conventions) -> Any:
    """The arguments as the template wants them. Text that is no JSON object stays as it is."""
    try:
        value = json.loads(call.arguments_json or "{}")
    except ValueError:
        return call.arguments_json
    if how.arguments == "text":
        # One spelling for both ways of writing a row; it is the one of `tojson`.
        return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else call.arguments_json
    return value
