"""Answers in steps, each right or wrong: process supervision."""

from __future__ import annotations

from gym_data.formats._base import Row, RowError
from gym_data.formats._meta import dump_meta, load_meta
from gym_data.formats._sides import read_side, rest_of, write_side
from gym_data.record import Candidate, Record, Source, text_message


class Stepwise:
    """`{"prompt", "completions": [text], "labels": [true | false]}`; each step is a candidate, in order."""

    name = "stepwise"
    signature = "prompt, completions, labels"
    fields: tuple[str, ...] = ("prompt", "completions", "labels")

    def matches(self, row: Row) -> bool:
        return "prompt" in row and isinstance(row.get("completions"), list) and isinstance(row.get("labels"), list)

    def to_record(self, row: Row, source: Source) -> Record:
        prompt, hint = read_side(row.get("prompt"), "user", "prompt")
        steps, labels = row.get("completions"), row.get("labels")
        if not isinstance(steps, list) or not isinstance(labels, list) or len(steps) != len(labels):
            raise RowError("completions and labels must be lists of one length", "labels")
        for index, (step, label) in enumerate(zip(steps, labels, strict=True)):
            if not isinstance(step, str):
                raise RowError("a step must be text", f"completions[{index}]")
            if not isinstance(label, bool):
                raise RowError("a label must be true or false", f"labels[{index}]")
        return Record(
            "stepwise",
            tuple(prompt),
            tuple(
                Candidate((text_message("assistant", step),), label=label)
                for step, label in zip(steps, labels, strict=True)
            ),
            meta_json=dump_meta(prompt=hint, extra=rest_of(row, self.fields)),
            source=source,
        )

    def export(self, record: Record) -> Row:
        meta = load_meta(record.meta_json)
        return {
            "prompt": write_side(record.prompt, meta.get("prompt")),
            "completions": [candidate.messages[0].text for candidate in record.candidates],
            "labels": [candidate.label for candidate in record.candidates],
            **meta.get("extra", {}),
        }
