"""One answer and whether it is good: KTO's rows."""

from __future__ import annotations

from typing import Any

from gym_data.formats._base import Row, RowError, type_name
from gym_data.formats._meta import dump_meta, load_meta
from gym_data.formats._sides import read_side, read_tools, rest_of, tools_hint, write_side, write_tools
from gym_data.formats.openai import messages_from_openai, messages_to_openai, split_answer
from gym_data.record import Candidate, Record, Source

_LABELS = ("label", "kto_tag")
_WORDS = {"true": True, "false": False}


class Unpaired:
    """`{"prompt", "completion", "label": true | false}`, or `messages` and a label; `kto_tag` is a label too."""

    name = "unpaired"
    signature = "prompt, completion, label (or messages, label)"
    fields: tuple[str, ...] = ("prompt", "completion", "messages", "tools", *_LABELS)

    def matches(self, row: Row) -> bool:
        body = ("prompt" in row and "completion" in row) or isinstance(row.get("messages"), list)
        return body and any(key in row for key in _LABELS)

    def to_record(self, row: Row, source: Source) -> Record:
        key = next((key for key in _LABELS if key in row), "label")
        label, label_hint = _label(row.get(key), key)
        if "messages" in row:
            messages, hints = messages_from_openai(row["messages"])
            prompt, candidates = split_answer(messages)
            if not candidates:
                raise RowError("the chat has no answer that the label could be about", "messages")
            answer, form = candidates[0].messages, {"messages": hints, "form": "messages"}
        else:
            side, prompt_hint = read_side(row.get("prompt"), "user", "prompt")
            completion, completion_hint = read_side(row.get("completion"), "assistant", "completion")
            prompt, answer = tuple(side), tuple(completion)
            form = {"prompt": prompt_hint, "completion": completion_hint}
        used = ("messages",) if "messages" in row else ("prompt", "completion")
        return Record(
            "unpaired",
            prompt,
            (Candidate(answer, label=label),),
            tools_json=read_tools(row),
            meta_json=dump_meta(
                **form,
                key=key if key != "label" else None,
                label=label_hint,
                tools=tools_hint(row),
                extra=rest_of(row, (*used, "tools", key)),
            ),
            source=source,
        )

    def export(self, record: Record) -> Row:
        meta = load_meta(record.meta_json)
        answer = record.candidates[0]
        if meta.get("form") == "messages":
            row: Row = {"messages": messages_to_openai(record.messages, meta.get("messages", {}))}
        else:
            row = {
                "prompt": write_side(record.prompt, meta.get("prompt")),
                "completion": write_side(answer.messages, meta.get("completion")),
            }
        label: Any = meta.get("label", answer.label)
        return {
            **row,
            meta.get("key", "label"): label,
            **write_tools(record, meta.get("tools")),
            **meta.get("extra", {}),
        }


def _label(value: Any, key: str) -> tuple[bool, str | None]:
    """The label, and its text where a table had it as text."""
    if isinstance(value, bool):
        return value, None
    if isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()], value
    raise RowError(f"{key} must be true or false, not {value!r:.40} ({type_name(value)})", key)
