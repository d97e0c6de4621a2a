"""OpenAI chat rows: `messages`, and `tools` beside them. Also the message form that serving receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gym_data._json import dumps, loads
from gym_data.formats._base import Row, RowError, type_name
from gym_data.formats._meta import dump_meta, dump_optional, load_meta
from gym_data.record import ROLES, Candidate, Message, Part, PartType, Record, Source, ToolCall

Hints = dict[str, Any]
"""How a message was written, where there is more than one way: kept for the way back."""

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_MESSAGE_KEYS = {"role", "content", "name", "tool_call_id", "tool_calls", "function_call", "refusal", "weight", "train"}
_OTHER_SHAPES = frozenset({"chosen", "rejected", "label", "kto_tag", "prompt"})
_MEDIA: dict[str, tuple[PartType, str | None]] = {
    "image_url": ("image", "url"),
    "input_audio": ("audio", "data"),
    "audio_url": ("audio", "url"),
    "video_url": ("video", "url"),
    "image": ("image", None),
    "audio": ("audio", None),
    "video": ("video", None),
}


class OpenAI:
    """`{"messages": [{"role", "content", ...}], "tools": [...]}`"""

    name = "openai"
    signature = "messages"
    fields: tuple[str, ...] = ("messages", "tools")

    def matches(self, row: Row) -> bool:
        if not has_messages(row):
            return False
        messages = row["messages"]
        if messages[-1]["role"] == "assistant":
            return True
        # Ending otherwise, it is a prompt to sample from, unless it has answers and nothing to grade them by.
        return any(message["role"] == "assistant" for message in messages) and row.keys() <= {"messages", "tools"}

    def to_record(self, row: Row, source: Source) -> Record:
        messages, hints = messages_from_openai(row.get("messages"), "messages")
        prompt, candidates = split_answer(messages)
        if len(row) == 1 and not hints:
            return Record("chat", prompt, candidates, source=source)
        tools = row.get("tools")
        return Record(
            "chat",
            prompt,
            candidates,
            tools_json=dump_optional(tools),
            meta_json=dump_meta(
                messages=hints,
                extra={key: value for key, value in row.items() if key not in ("messages", "tools")},
                null_tools="tools" in row and tools is None,
            ),
            source=source,
        )

    def export(self, record: Record) -> Row:
        meta = load_meta(record.meta_json)
        row: Row = {"messages": messages_to_openai(record.messages, meta.get("messages", {}))}
        if record.tools_json is not None:
            row["tools"] = loads(record.tools_json)
        elif meta.get("null_tools"):
            row["tools"] = None
        return {**row, **meta.get("extra", {})}


def has_messages(row: Row) -> bool:
    """Whether the row is built around OpenAI messages."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages or not _OTHER_SHAPES.isdisjoint(row):
        return False
    for message in messages:  # noqa: SIM110 - asked of every row, and twice as fast as all()
        if not isinstance(message, dict) or "role" not in message:
            return False
    return True


def split_answer(messages: Sequence[Message]) -> tuple[tuple[Message, ...], tuple[Candidate, ...]]:
    """A chat as prompt and answer: the last assistant message, and what follows it, is the candidate."""
    for last in range(len(messages) - 1, -1, -1):
        if messages[last].role == "assistant":
            return tuple(messages[:last]), (Candidate(tuple(messages[last:])),)
    return tuple(messages), ()


def messages_from_openai(items: Any, path: str = "messages") -> tuple[list[Message], dict[str, Hints]]:
    """Messages of a list of OpenAI messages, and the hints by index. Raises RowError."""
    if not isinstance(items, list):
        raise RowError(f"must be a list of messages, not {type_name(items)}", path)
    if not items:
        raise RowError("has no message", path)
    messages: list[Message] = []
    hints: dict[str, Hints] = {}
    for index, item in enumerate(items):
        message = _plain_message(item)
        if message is None:
            message, hint = message_from_openai(item, f"{path}[{index}]")
            if hint:
                hints[str(index)] = hint
        messages.append(message)
    return messages, hints


def messages_to_openai(messages: Sequence[Message], hints: dict[str, Hints]) -> list[Row]:
    """The way back."""
    return [message_to_openai(message, hints.get(str(index), {})) for index, message in enumerate(messages)]


def _plain_message(item: Any) -> Message | None:
    """The most common message by far, a known role and text; None for any other."""
    if type(item) is dict and len(item) == 2:
        content = item.get("content")
        if type(content) is str and (role := item.get("role")) in ROLES:
            return Message(role, (Part("text", content),))
    return None


def message_from_openai(item: Any, path: str = "message") -> tuple[Message, Hints]:
    """One message. Raises RowError for an unknown role and for anything that would be lost."""
    if not isinstance(item, dict):
        raise RowError(f"a message must be an object, not {type_name(item)}", path)
    if (plain := _plain_message(item)) is not None:
        return plain, {}
    role = item.get("role")
    hint: Hints = {}
    if role == "function":
        hint["role"], role = role, "tool"
    if role not in ROLES:
        raise RowError(f"unknown role {role!r}; the roles are {', '.join(ROLES)}", f"{path}.role")
    parts: list[Part] = []
    reasoning_keys = [key for key in _REASONING_KEYS if item.get(key) is not None]
    for key in reasoning_keys:
        if not isinstance(item[key], str):
            raise RowError(f"{key} must be text, not {type_name(item[key])}", f"{path}.{key}")
    if reasoning_keys:
        if len({item[key] for key in reasoning_keys}) > 1:
            raise RowError("two reasoning fields that differ", f"{path}.{reasoning_keys[1]}")
        parts.append(Part("reasoning", item[reasoning_keys[0]]))
        if reasoning_keys != ["reasoning_content"]:
            hint["reasoning"] = reasoning_keys
    parts += _content_parts(item, path, hint)
    refusal = item.get("refusal")
    if isinstance(refusal, str):
        parts.append(Part("refusal", refusal))
    elif refusal is not None:
        raise RowError(f"a refusal must be text, not {type_name(refusal)}", f"{path}.refusal")
    parts += _call_parts(item, path, hint)
    weight = item.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise RowError(f"a message's weight is 0 or 1, not {weight!r}", f"{path}.weight")
    train = item.get("train")
    if train is not None and not isinstance(train, bool):
        raise RowError(f"train must be true or false, not {type_name(train)}", f"{path}.train")
    for key in ("name", "tool_call_id"):
        if item.get(key) is not None and not isinstance(item[key], str):
            raise RowError(f"{key} must be text, not {type_name(item[key])}", f"{path}.{key}")
    if nulls := [key for key, value in item.items() if value is None and key != "content"]:
        hint["nulls"] = nulls
    known = _MESSAGE_KEYS.union(reasoning_keys)
    if extra := {key: value for key, value in item.items() if key not in known and value is not None}:
        hint["extra"] = extra
    message = Message(role, tuple(parts), item.get("name"), item.get("tool_call_id"), train, weight)
    return message, hint


def message_to_openai(message: Message, hint: Hints | None = None) -> Row:
    """The OpenAI form of a message."""
    hint = hint or {}
    item: Row = {"role": hint.get("role", message.role)}
    reasoning = [part for part in message.parts if part.type == "reasoning"]
    if reasoning := reasoning[: len(reasoning) - hint.get("listed_reasoning", 0)]:
        for key in hint.get("reasoning", ["reasoning_content"]):
            item[key] = "".join(part.text or "" for part in reasoning)
    content = [part for part in message.parts if part.type in ("text", "image", "audio", "video")]
    in_list = hint.get("refusals", [])
    content += [part for part in message.parts if part.type == "refusal"][: len(in_list)]
    form = hint.get("content")
    if form == "parts" or any(part.type != "text" for part in content):
        item["content"] = _export_parts(message.parts, hint)
    elif content:
        item["content"] = message.text
    elif form != "missing":
        item["content"] = None
    refusals = [part for part in message.parts if part.type == "refusal"][len(in_list) :]
    if refusals:
        item["refusal"] = "".join(part.text or "" for part in refusals)
    if message.calls:
        item |= _export_calls(message.calls, hint)
    elif hint.get("empty_calls"):
        item["tool_calls"] = []
    for key, value in (
        ("name", message.name),
        ("tool_call_id", message.tool_call_id),
        ("weight", message.weight),
        ("train", message.train),
    ):
        if value is not None:
            item[key] = value
    return {**item, **dict.fromkeys(hint.get("nulls", [])), **hint.get("extra", {})}


def _content_parts(item: Row, path: str, hint: Hints) -> list[Part]:
    if "content" not in item:
        hint["content"] = "missing"
        return []
    content = item["content"]
    if content is None:
        return []
    if isinstance(content, str):
        return [Part("text", content)]
    if not isinstance(content, list):
        raise RowError(f"content must be text or a list of parts, not {type_name(content)}", f"{path}.content")
    hint["content"] = "parts"
    parts: list[Part] = []
    for index, piece in enumerate(content):
        place = f"{path}.content[{index}]"
        part = _content_part(piece, place)
        parts.append(part)
        if part.type == "refusal":
            hint.setdefault("refusals", []).append(index)
        if part.type == "reasoning":
            hint["listed_reasoning"] = hint.get("listed_reasoning", 0) + 1
        if _export_part(part) != piece:
            hint.setdefault("parts", {})[str(index)] = piece
    return parts


def _content_part(piece: Any, path: str) -> Part:
    if isinstance(piece, str):
        return Part("text", piece)
    if not isinstance(piece, dict):
        raise RowError(f"a content part must be an object, not {type_name(piece)}", path)
    kind = piece.get("type")
    if kind in ("text", "input_text", "output_text"):
        if not isinstance(piece.get("text"), str):
            raise RowError(f"a text part's text must be text, not {type_name(piece.get('text'))}", f"{path}.text")
        return Part("text", piece["text"])
    if kind == "refusal" and isinstance(piece.get("refusal"), str):
        return Part("refusal", piece["refusal"])
    if kind in ("reasoning", "thinking"):
        text = piece.get("text", piece.get(kind))
        if isinstance(text, str):
            return Part("reasoning", text)
    if kind in _MEDIA:
        type_, key = _MEDIA[kind]
        value = next((piece[k] for k in (kind, "url", "path") if piece.get(k) is not None), None)
        value = value.get(key) if isinstance(value, dict) and key else value
        if value is None or isinstance(value, str):
            return Part(type_, media=value)
    raise RowError(f"unknown content part of type {kind!r}", path)


def _export_part(part: Part) -> Row:
    if part.type == "text":
        return {"type": "text", "text": part.text}
    if part.type == "refusal":
        return {"type": "refusal", "refusal": part.text}
    if part.type == "reasoning":
        return {"type": "reasoning", "text": part.text}
    if part.type == "image":
        return {"type": "image_url", "image_url": {"url": part.media}}
    return {"type": part.type, part.type: part.media}


def _export_parts(parts: Sequence[Part], hint: Hints) -> list[Any]:
    """The content list. A hinted part is written as it was as long as the record still says the same."""
    exported: list[Any] = []
    skip_reasoning = len([p for p in parts if p.type == "reasoning"]) - hint.get("listed_reasoning", 0)
    limit_refusals = len(hint.get("refusals", []))
    for part in parts:
        if part.type == "tool_call":
            continue
        if part.type == "reasoning" and skip_reasoning:
            skip_reasoning -= 1
            continue
        if part.type == "refusal":
            if not limit_refusals:
                continue
            limit_refusals -= 1
        original = hint.get("parts", {}).get(str(len(exported)))
        exported.append(
            original if original is not None and _content_part(original, "") == part else _export_part(part)
        )
    return exported


def _call_parts(item: Row, path: str, hint: Hints) -> list[Part]:
    calls = item.get("tool_calls")
    legacy = item.get("function_call")
    if calls is not None and not isinstance(calls, list):
        raise RowError(f"tool_calls must be a list, not {type_name(calls)}", f"{path}.tool_calls")
    if calls == []:
        hint["empty_calls"] = True
    if legacy is not None:
        if calls:
            raise RowError("both tool_calls and function_call", f"{path}.function_call")
        hint["function_call"] = True
        calls = [{"type": "function", "function": legacy}]
    parts: list[Part] = []
    for index, call in enumerate(calls or []):
        place = f"{path}.tool_calls[{index}]"
        if not isinstance(call, dict):
            raise RowError(f"a tool call must be an object, not {type_name(call)}", place)
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError("a tool call needs a function with a name", place)
        arguments = function.get("arguments")
        if not isinstance(arguments, str | dict | type(None)):
            raise RowError(
                f"arguments must be an object or JSON text, not {type_name(arguments)}", f"{place}.arguments"
            )
        if call.get("id") is not None and not isinstance(call["id"], str):
            raise RowError(f"a call's id must be text, not {type_name(call['id'])}", f"{place}.id")
        text = arguments if isinstance(arguments, str) else dumps(arguments) if arguments is not None else ""
        made = ToolCall(function["name"], text, call.get("id"))
        if _export_call(made) != call:
            hint.setdefault("calls", {})[str(index)] = call
        parts.append(Part("tool_call", call=made))
    return parts


def _export_call(call: ToolCall) -> Row:
    function = {"name": call.name, "arguments": call.arguments_json}
    return {**({"id": call.id} if call.id is not None else {}), "type": "function", "function": function}


def _export_calls(calls: Sequence[ToolCall], hint: Hints) -> Row:
    exported = []
    for index, call in enumerate(calls):
        original = hint.get("calls", {}).get(str(index))
        same = original is not None and _call_parts({"tool_calls": [original]}, "", {})[0].call == call
        exported.append(original if same else _export_call(call))
    return {"function_call": exported[0]["function"]} if hint.get("function_call") else {"tool_calls": exported}
