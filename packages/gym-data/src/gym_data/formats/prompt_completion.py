"""Prompt and completion, each a text or a list of messages."""

from __future__ import annotations

from gym_data.formats._base import Row
from gym_data.formats._meta import dump_meta, load_meta
from gym_data.formats._sides import read_side, read_tools, rest_of, tools_hint, write_side, write_tools
from gym_data.record import Candidate, Record, Source

ALIASES = (("question", "answer"), ("instruction", "response"), ("query", "response"), ("input", "output"))
"""Other common names of the two columns, taken when a row has no others of its kind."""


class PromptCompletion:
    """`{"prompt": text | [message], "completion": text | [message], "tools": [...]}`

    A text prompt is a user's turn, a text completion the answer to it.
    """

    name = "prompt_completion"
    signature = "prompt, completion (or question, answer; instruction, response; input, output)"
    fields: tuple[str, ...] = ("prompt", "completion", "tools")

    def matches(self, row: Row) -> bool:
        return _names(row) is not None and not {"label", "kto_tag"} & row.keys()

    def to_record(self, row: Row, source: Source) -> Record:
        names = _names(row) or ("prompt", "completion")
        prompt, prompt_hint = read_side(row.get(names[0]), "user", names[0])
        completion, completion_hint = read_side(row.get(names[1]), "assistant", names[1])
        return Record(
            "chat",
            tuple(prompt),
            (Candidate(tuple(completion)),),
            tools_json=read_tools(row),
            meta_json=dump_meta(
                names=list(names) if names != ("prompt", "completion") else None,
                prompt=prompt_hint,
                completion=completion_hint,
                tools=tools_hint(row),
                extra=rest_of(row, (*names, "tools")),
            ),
            source=source,
        )

    def export(self, record: Record) -> Row:
        meta = load_meta(record.meta_json)
        prompt, completion = meta.get("names", ("prompt", "completion"))
        return {
            prompt: write_side(record.prompt, meta.get("prompt")),
            completion: write_side(record.candidates[0].messages, meta.get("completion")),
            **write_tools(record, meta.get("tools")),
            **meta.get("extra", {}),
        }


def _names(row: Row) -> tuple[str, str] | None:
    if "prompt" in row:
        return ("prompt", "completion") if "completion" in row else None
    return next((pair for pair in ALIASES if pair[0] in row and pair[1] in row), None)
