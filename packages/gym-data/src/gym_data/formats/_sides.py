"""Prompts and answers that are a text or a list of messages, and the tools beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gym_data._json import loads
from gym_data.formats._base import Row, RowError, type_name
from gym_data.formats._meta import dump_optional
from gym_data.formats.openai import messages_from_openai, messages_to_openai
from gym_data.record import Message, Record, Role, text_message

Hint = dict[str, Any]


def read_side(value: Any, role: Role, key: str) -> tuple[list[Message], Hint | None]:
    """The messages of a text or a list of messages, and the hint for the way back (None for a text)."""
    if isinstance(value, str):
        return [text_message(role, value)], None
    if isinstance(value, list):
        messages, hints = messages_from_openai(value, key)
        return messages, {"messages": hints}
    raise RowError(f"{key} must be text or a list of messages, not {type_name(value)}", key)


def write_side(messages: Sequence[Message], hint: Hint | None) -> Any:
    """The way back."""
    if hint is None and len(messages) == 1:
        return messages[0].text
    return messages_to_openai(messages, (hint or {}).get("messages", {}))


def read_tools(row: Row) -> str | None:
    """The tool schemas as JSON text."""
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list | str):
        raise RowError(f"tools must be a list of schemas, not {type_name(tools)}", "tools")
    return tools if isinstance(tools, str) else dump_optional(tools)


def tools_hint(row: Row) -> str | None:
    """How the tools were written, where that is not a list."""
    if "tools" not in row or isinstance(row["tools"], list):
        return None
    return "null" if row["tools"] is None else "text"


def write_tools(record: Record, hint: str | None) -> Row:
    """The way back: a row with `tools`, or an empty one."""
    if record.tools_json is None:
        return {"tools": None} if hint == "null" else {}
    return {"tools": record.tools_json if hint == "text" else loads(record.tools_json)}


def rest_of(row: Row, fields: Sequence[str]) -> Row:
    """What the format does not read."""
    return {key: value for key, value in row.items() if key not in fields}
