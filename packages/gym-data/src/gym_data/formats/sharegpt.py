"""ShareGPT rows: `conversations` of `from` and `value`."""

from __future__ import annotations

from typing import Any

from gym_data._json import dumps, loads
from gym_data.formats._base import Row, RowError, type_name
from gym_data.formats._media import MEDIA_KEYS, MediaReader, media_lists, placeholder_text
from gym_data.formats._meta import dump_meta, load_meta
from gym_data.formats._sides import read_tools, rest_of, tools_hint, write_tools
from gym_data.formats.openai import messages_from_openai, messages_to_openai, split_answer
from gym_data.record import Candidate, Message, Part, Record, Role, Source, ToolCall, text_message

Hint = dict[str, Any]

CALL = "function_call"
_ROLES: dict[str, tuple[Role, str]] = {
    # what a row says: (role, the name written back unless the row's differs)
    **dict.fromkeys(("human", "user"), ("user", "human")),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bing", "bard"), ("assistant", "gpt")),
    **dict.fromkeys(("system",), ("system", "system")),
    **dict.fromkeys((CALL, "tool_call"), ("assistant", CALL)),
    **dict.fromkeys(("observation", "tool", "tool_response", "function_response"), ("tool", "observation")),
}
_TURN_FIELDS = ("from", "value", "weight", "train")


class ShareGPT:
    """`{"conversations": [{"from", "value"}], "system", "tools"}`

    `function_call` turns hold a call, or a list of calls, as JSON text; `observation` turns hold a tool's result. With
    `chosen` and `rejected` turns beside the conversation the row is a preference, with `kto_tag` a labelled answer.
    `images`, `videos` and `audios` fill the `<image>`, `<video>` and `<audio>` of the texts. Turns need not alternate:
    whether a template can write them is the template's matter.
    """

    name = "sharegpt"
    signature = "conversations"
    fields: tuple[str, ...] = ("conversations", "system", "tools", "chosen", "rejected", "kto_tag", *MEDIA_KEYS)

    def matches(self, row: Row) -> bool:
        return isinstance(row.get("conversations"), list)

    def to_record(self, row: Row, source: Source) -> Record:
        turns = row.get("conversations")
        if not isinstance(turns, list) or not turns:
            raise RowError(f"conversations must be a list of turns, not {type_name(turns)}", "conversations")
        if isinstance(turns[0], dict) and "role" in turns[0]:
            return self._openai_record(row, source)
        media = MediaReader(row)
        messages, hints = self._messages(turns, media)
        system = row.get("system")
        if system is not None and not isinstance(system, str):
            raise RowError(f"system must be text, not {type_name(system)}", "system")
        if system:
            if any(message.role == "system" for message in messages):
                raise RowError("both a system key and a system turn: which one is meant?", "system")
            messages.insert(0, text_message("system", system))
        form = {key: row[key] for key in ("system", *MEDIA_KEYS) if key in row and not row[key]}
        kept = {"turns": hints, "form": form, "tools": tools_hint(row), "system_key": bool(system)}
        return self._record(row, source, messages, media, kept)

    def _openai_record(self, row: Row, source: Source) -> Record:
        """Conversations whose turns have OpenAI's keys."""
        messages, hints = messages_from_openai(row["conversations"], "conversations")
        prompt, candidates = split_answer(messages)
        return Record(
            "chat",
            prompt,
            candidates,
            tools_json=read_tools(row),
            meta_json=dump_meta(
                openai=True, messages=hints, tools=tools_hint(row), extra=rest_of(row, ("conversations", "tools"))
            ),
            source=source,
        )

    def _record(
        self, row: Row, source: Source, messages: list[Message], media: MediaReader, kept: dict[str, Any]
    ) -> Record:
        extra = rest_of(row, self.fields)
        tools = read_tools(row)
        if "chosen" in row or "rejected" in row:
            answers, kept["answers"] = self._messages(
                [row.get("chosen"), row.get("rejected")], media, "chosen/rejected"
            )
            media.finish()
            pair = (Candidate((answers[0],), rank=0), Candidate((answers[1],), rank=1))
            return Record(
                "preference", tuple(messages), pair, None, tools, None, dump_meta(**kept, extra=extra), None, source
            )
        media.finish()
        prompt, candidates = split_answer(messages)
        if "kto_tag" not in row:
            return Record("chat", prompt, candidates, None, tools, None, dump_meta(**kept, extra=extra), None, source)
        tag = row["kto_tag"]
        if not isinstance(tag, bool) or not candidates:
            raise RowError("kto_tag must be true or false, and the conversation have an answer", "kto_tag")
        labelled = (Candidate(candidates[0].messages, label=tag),)
        return Record("unpaired", prompt, labelled, None, tools, None, dump_meta(**kept, extra=extra), None, source)

    def _messages(
        self, turns: list[Any], media: MediaReader, key: str = "conversations"
    ) -> tuple[list[Message], dict[str, Hint]]:
        messages: list[Message] = []
        hints: dict[str, Hint] = {}
        for index, turn in enumerate(turns):
            path = f"{key}[{index}]"
            if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
                raise RowError("a turn needs from and value", path)
            said, value = turn["from"], turn["value"]
            if said not in _ROLES:
                raise RowError(f"unknown speaker {said!r}; known are {', '.join(_ROLES)}", f"{path}.from")
            if not isinstance(value, str):
                raise RowError(f"value must be text, not {type_name(value)}", f"{path}.value")
            role, written = _ROLES[said]
            parts = _calls(value, path) if written == CALL else media.parts(value)
            messages.append(Message(role, parts, train=_train(turn, path), weight=_weight(turn, path)))
            hint: Hint = {"from": said} if said != written else {}
            if written == CALL and _write_calls(messages[-1]) != value:
                hint["value"] = value
            if extra := rest_of(turn, _TURN_FIELDS):
                hint["extra"] = extra
            if nulls := [name for name in ("weight", "train") if name in turn and turn[name] is None]:
                hint["nulls"] = nulls
            if hint:
                hints[str(index)] = hint
        return messages, hints

    def export(self, record: Record) -> Row:
        meta = load_meta(record.meta_json)
        tools = write_tools(record, meta.get("tools"))
        if meta.get("openai"):
            turns = messages_to_openai(record.messages, meta.get("messages", {}))
            return {"conversations": turns, **tools, **meta.get("extra", {})}
        messages = record.prompt if record.kind == "preference" else record.messages
        row: Row = {}
        every = [*record.prompt, *(m for candidate in record.candidates for m in candidate.messages)]
        if meta.get("system_key") and messages and messages[0].role == "system":
            row["system"] = messages[0].text
            messages = messages[1:]
        row["conversations"] = _turns(messages, meta.get("turns", {}))
        if record.kind == "preference":
            answers = [candidate.messages[0] for candidate in record.candidates]
            row["chosen"], row["rejected"] = _turns(answers, meta.get("answers", {}))
        if record.kind == "unpaired":
            row["kto_tag"] = record.candidates[0].label
        return {**row, **media_lists(every), **tools, **meta.get("form", {}), **meta.get("extra", {})}


def _turns(messages: Any, hints: dict[str, Hint]) -> list[Row]:
    turns = []
    for index, message in enumerate(messages):
        hint = hints.get(str(index), {})
        written = CALL if message.calls else next(name for role, name in _ROLES.values() if role == message.role)
        turn: Row = {"from": hint.get("from", written)}
        turn["value"] = _write_calls(message) if message.calls else placeholder_text(message)
        original = hint.get("value")
        if original is not None and _calls(original, "") == message.parts:
            turn["value"] = original
        if message.weight is not None:
            turn["weight"] = message.weight
        if message.train is not None:
            turn["train"] = message.train
        turns.append({**turn, **dict.fromkeys(hint.get("nulls", [])), **hint.get("extra", {})})
    return turns


def _calls(value: str, path: str) -> tuple[Part, ...]:
    """The calls of a `function_call` turn: one object or a list of them, as JSON text."""
    try:
        parsed = loads(value)
    except ValueError:
        raise RowError("a function_call's value must be JSON", f"{path}.value") from None
    parts = []
    for call in parsed if isinstance(parsed, list) else [parsed]:
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            raise RowError("a function_call needs name and arguments", f"{path}.value")
        parts.append(
            Part("tool_call", call=ToolCall(name, arguments if isinstance(arguments, str) else dumps(arguments)))
        )
    if not parts:
        raise RowError("a function_call without a call", f"{path}.value")
    return tuple(parts)


def _write_calls(message: Message) -> str:
    calls = [{"name": call.name, "arguments": _arguments(call.arguments_json)} for call in message.calls]
    return dumps(calls[0] if len(calls) == 1 else calls)


def _arguments(text: str) -> Any:
    try:
        return loads(text)
    except ValueError:
        return text


def _train(turn: Row, path: str) -> bool | None:
    train = turn.get("train")
    if train is not None and not isinstance(train, bool):
        raise RowError(f"train must be true or false, not {type_name(train)}", f"{path}.train")
    return train


def _weight(turn: Row, path: str) -> float | None:
    weight = turn.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise RowError(f"a turn's weight is 0 or 1, not {weight!r}", f"{path}.weight")
    return weight
