"""OpenAI's preference rows."""

from __future__ import annotations

from gym_data.formats._base import Row, RowError, type_name
from gym_data.formats._meta import dump_meta, load_meta
from gym_data.formats._sides import read_tools, rest_of, tools_hint, write_tools
from gym_data.formats.openai import messages_from_openai, messages_to_openai
from gym_data.record import Candidate, Record, Source


class OpenAIPreference:
    """`{"input": {"messages", "tools"}, "preferred_output": [message], "non_preferred_output": [message]}`"""

    name = "openai_preference"
    signature = "input, preferred_output, non_preferred_output"
    fields: tuple[str, ...] = ("input", "preferred_output", "non_preferred_output")

    def matches(self, row: Row) -> bool:
        return all(key in row for key in self.fields)

    def to_record(self, row: Row, source: Source) -> Record:
        given = row.get("input")
        if not isinstance(given, dict):
            raise RowError(f"input must be an object with messages, not {type_name(given)}", "input")
        prompt, prompt_hints = messages_from_openai(given.get("messages"), "input.messages")
        better, better_hints = messages_from_openai(row.get("preferred_output"), "preferred_output")
        worse, worse_hints = messages_from_openai(row.get("non_preferred_output"), "non_preferred_output")
        return Record(
            "preference",
            tuple(prompt),
            (Candidate(tuple(better), rank=0), Candidate(tuple(worse), rank=1)),
            tools_json=read_tools(given),
            meta_json=dump_meta(
                prompt=prompt_hints,
                chosen=better_hints,
                rejected=worse_hints,
                tools=tools_hint(given),
                input=rest_of(given, ("messages", "tools")),
                extra=rest_of(row, self.fields),
            ),
            source=source,
        )

    def export(self, record: Record) -> Row:
        meta = load_meta(record.meta_json)
        chosen, rejected = record.candidates
        return {
            "input": {
                "messages": messages_to_openai(record.prompt, meta.get("prompt", {})),
                **write_tools(record, meta.get("tools")),
                **meta.get("input", {}),
            },
            "preferred_output": messages_to_openai(chosen.messages, meta.get("chosen", {})),
            "non_preferred_output": messages_to_openai(rejected.messages, meta.get("rejected", {})),
            **meta.get("extra", {}),
        }
