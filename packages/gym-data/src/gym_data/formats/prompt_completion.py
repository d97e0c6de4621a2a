"""Prompt and completion, each a text or a list of messages."""

from __future__ import annotations

from typing import Any

from gym_data.formats._base import Row, RowError, type_name
from gym_data.formats._meta import dump_meta, dump_optional, load_meta
from gym_data.formats.openai import load_json, messages_from_openai, messages_to_openai
from gym_data.record import Candidate, Message, Record, Role, Source, text_message

_KEYS = ("prompt", "completion", "tools")


class PromptCompletion:
    """`{"prompt": text | [message], "completion": text | [message], "tools": [...]}`

    A text prompt is a user's turn, a text completion the answer to it.
    """

    name = "prompt_completion"
    signature = "prompt, completion"

    def matches(self, row: Row) -> bool:
        return "prompt" in row and "completion" in row and "label" not in row

    def to_record(self, row: Row, source: Source) -> Record:
        prompt, prompt_hint = side(row.get("prompt"), "user", "prompt")
        completion, completion_hint = side(row.get("completion"), "assistant", "completion")
        return Record(
            "chat",
            tuple(prompt),
            (Candidate(tuple(completion)),),
            tools_json=dump_optional(row.get("tools")),
            meta_json=dump_meta(
                prompt=prompt_hint,
                completion=completion_hint,
                null_tools="tools" in row and row["tools"] is None,
                extra={key: value for key, value in row.items() if key not in _KEYS},
            ),
            source=source,
        )

    def export(self, record: Record) -> Row:
        meta = load_meta(record.meta_json)
        row: Row = {
            "prompt": export_side(record.prompt, meta.get("prompt")),
            "completion": export_side(record.candidates[0].messages, meta.get("completion")),
        }
        if record.tools_json is not None:
            row["tools"] = load_json(record.tools_json)
        elif meta.get("null_tools"):
            row["tools"] = None
        return {**row, **meta.get("extra", {})}


def side(value: Any, role: Role, key: str) -> tuple[list[Message], dict[str, Any] | None]:
    """The messages of a text or a list of messages, and the hint for the way back (None for a text)."""
    if isinstance(value, str):
        return [text_message(role, value)], None
    if isinstance(value, list):
        messages, hints = messages_from_openai(value, key)
        return messages, {"messages": hints}
    raise RowError(f"{key} must be text or a list of messages, not {type_name(value)}", key)


def export_side(messages: tuple[Message, ...], hint: dict[str, Any] | None) -> Any:
    """The way back."""
    if hint is None and len(messages) == 1:
        return messages[0].text
    return messages_to_openai(messages, (hint or {}).get("messages", {}))
