"""Plain text, trained whole: continued pre-training."""

from __future__ import annotations

from gym_data.formats._base import Row, text_of
from gym_data.formats._meta import dump_meta, load_meta
from gym_data.formats._sides import rest_of
from gym_data.record import Candidate, Record, Source, text_message


class Text:
    """`{"text": ...}`"""

    name = "text"
    signature = "text"
    fields: tuple[str, ...] = ("text",)

    def matches(self, row: Row) -> bool:
        return isinstance(row.get("text"), str)

    def to_record(self, row: Row, source: Source) -> Record:
        return Record(
            "text",
            candidates=(Candidate((text_message("assistant", text_of(row, "text")),)),),
            meta_json=dump_meta(extra=rest_of(row, self.fields)),
            source=source,
        )

    def export(self, record: Record) -> Row:
        return {"text": record.messages[0].text, **load_meta(record.meta_json).get("extra", {})}
