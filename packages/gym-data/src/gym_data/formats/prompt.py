"""Prompts without answers, with whatever a reward needs beside them."""

from __future__ import annotations

from gym_data._json import dumps, loads
from gym_data.formats._base import Row
from gym_data.formats._meta import dump_meta, load_meta
from gym_data.formats._sides import read_side, read_tools, rest_of, tools_hint, write_side, write_tools
from gym_data.formats.openai import has_messages, messages_from_openai, messages_to_openai
from gym_data.record import Record, Source

_ANSWERS = {"completion", "completions", "chosen", "rejected", "label", "kto_tag", "response"}


class Prompt:
    """`{"prompt": text | [message], ...}`; every other key is a reward's field, kept in `reward_json`."""

    name = "prompt"
    signature = "prompt"
    fields: tuple[str, ...] = ("prompt", "tools")

    def matches(self, row: Row) -> bool:
        return "prompt" in row and not _ANSWERS & row.keys()

    def to_record(self, row: Row, source: Source) -> Record:
        prompt, hint = read_side(row.get("prompt"), "user", "prompt")
        rest = rest_of(row, self.fields)
        return Record(
            "prompt",
            tuple(prompt),
            tools_json=read_tools(row),
            reward_json=dumps(rest) if rest else None,
            meta_json=dump_meta(prompt=hint, tools=tools_hint(row)),
            source=source,
        )

    def export(self, record: Record) -> Row:
        meta = load_meta(record.meta_json)
        return {
            "prompt": write_side(record.prompt, meta.get("prompt")),
            **write_tools(record, meta.get("tools")),
            **(loads(record.reward_json) if record.reward_json else {}),
        }


class OpenAIReinforcement:
    """OpenAI's reinforcement rows: `messages` that end before the answer, and reference fields beside them."""

    name = "openai_reinforcement"
    signature = "messages ending with a user's turn"
    fields: tuple[str, ...] = ("messages", "tools")

    def matches(self, row: Row) -> bool:
        return has_messages(row) and row["messages"][-1]["role"] != "assistant"

    def to_record(self, row: Row, source: Source) -> Record:
        messages, hints = messages_from_openai(row.get("messages"))
        rest = rest_of(row, self.fields)
        return Record(
            "prompt",
            tuple(messages),
            tools_json=read_tools(row),
            reward_json=dumps(rest) if rest else None,
            meta_json=dump_meta(messages=hints, tools=tools_hint(row)),
            source=source,
        )

    def export(self, record: Record) -> Row:
        meta = load_meta(record.meta_json)
        return {
            "messages": messages_to_openai(record.prompt, meta.get("messages", {})),
            **write_tools(record, meta.get("tools")),
            **(loads(record.reward_json) if record.reward_json else {}),
        }
