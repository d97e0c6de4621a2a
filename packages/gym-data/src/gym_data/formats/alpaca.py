"""Alpaca rows: `instruction`, `input`, `output`, and what LLaMA-Factory adds to them."""

from __future__ import annotations

from typing import Any

from gym_data.formats._base import Row, RowError, text_of, type_name
from gym_data.formats._media import MEDIA_KEYS, MediaReader, media_lists, placeholder_text
from gym_data.formats._meta import dump_meta, load_meta
from gym_data.formats._sides import read_tools, rest_of, tools_hint, write_tools
from gym_data.record import Candidate, Message, Record, RecordKind, Source, text_message


class Alpaca:
    """`{"instruction", "input", "output", "system", "history": [[user, assistant], ...]}`

    The user's turn is the instruction, and, when there is input, a line break and the input. The turns of `history` are
    turns like any other: trained under `train_on: all`, not under `last`. With `chosen` and `rejected` in place of
    `output` the row is a preference, with `kto_tag` beside it a labelled answer. `images`, `videos` and `audios` fill
    the `<image>`, `<video>` and `<audio>` of the texts.
    """

    name = "alpaca"
    signature = "instruction, output"
    fields: tuple[str, ...] = (
        "instruction", "input", "output", "system", "history", "chosen", "rejected", "kto_tag", "tools", *MEDIA_KEYS,
    )  # fmt: skip

    def matches(self, row: Row) -> bool:
        return "instruction" in row and ("output" in row or ("chosen" in row and "rejected" in row))

    def to_record(self, row: Row, source: Source) -> Record:
        media = MediaReader(row)
        prompt = self._prompt(row, media)
        kind, candidates = self._answers(row, media)
        media.finish()
        form = {
            key: row[key]
            for key in ("input", "system", "history", "output", *MEDIA_KEYS)
            if key in row and not row[key]
        }
        if isinstance(row.get("output"), str) and "chosen" not in row:
            form.pop("output", None)
        return Record(
            kind,
            prompt,
            candidates,
            tools_json=read_tools(row),
            meta_json=dump_meta(
                input=row.get("input"), form=form, tools=tools_hint(row), extra=rest_of(row, self.fields)
            ),
            source=source,
        )

    def _prompt(self, row: Row, media: MediaReader) -> tuple[Message, ...]:
        instruction = text_of(row, "instruction")
        extra_input, system, history = row.get("input"), row.get("system"), row.get("history")
        for key, value in (("input", extra_input), ("system", system)):
            if value is not None and not isinstance(value, str):
                raise RowError(f"{key} must be text, not {type_name(value)}", key)
        if history is not None and not isinstance(history, list):
            raise RowError(f"history must be a list of pairs, not {type_name(history)}", "history")
        prompt: list[Message] = [text_message("system", system)] if system else []
        for index, turn in enumerate(history or []):
            if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
                raise RowError("each turn of history is a pair of texts", f"history[{index}]")
            prompt += (Message("user", media.parts(turn[0])), Message("assistant", media.parts(turn[1])))
        question = f"{instruction}\n{extra_input}" if extra_input else instruction
        return (*prompt, Message("user", media.parts(question)))

    def _answers(self, row: Row, media: MediaReader) -> tuple[RecordKind, tuple[Candidate, ...]]:
        if "chosen" in row or "rejected" in row:
            better, worse = (Message("assistant", (media.parts(text_of(row, key)))) for key in ("chosen", "rejected"))
            if row.get("output"):
                raise RowError("both output and chosen: which answer is meant?", "output")
            return "preference", (Candidate((better,), rank=0), Candidate((worse,), rank=1))
        answer = (Message("assistant", media.parts(text_of(row, "output"))),)
        tag = row.get("kto_tag")
        if "kto_tag" not in row:
            return "chat", (Candidate(answer),)
        if not isinstance(tag, bool):
            raise RowError(f"kto_tag must be true or false, not {type_name(tag)}", "kto_tag")
        return "unpaired", (Candidate(answer, label=tag),)

    def export(self, record: Record) -> Row:
        meta = load_meta(record.meta_json)
        row: Row = {}
        if record.kind == "preference":
            row["chosen"], row["rejected"] = (placeholder_text(c.messages[0]) for c in record.candidates)
        else:
            row["output"] = placeholder_text(record.candidates[0].messages[0])
        if record.kind == "unpaired":
            row["kto_tag"] = record.candidates[0].label
        instruction, extra_input = placeholder_text(record.prompt[-1]), meta.get("input")
        if extra_input and instruction.endswith(f"\n{extra_input}"):
            row["input"] = extra_input
            instruction = instruction[: -len(extra_input) - 1]
        row["instruction"] = instruction
        rest = record.prompt[:-1]
        if rest and rest[0].role == "system":
            row["system"] = rest[0].text
            rest = rest[1:]
        if rest:
            pairs = zip(rest[::2], rest[1::2], strict=True)
            row["history"] = [[placeholder_text(user), placeholder_text(answer)] for user, answer in pairs]
        answers: list[Message] = [message for candidate in record.candidates for message in candidate.messages]
        extra: dict[str, Any] = meta.get("extra", {})
        media = media_lists((*record.prompt, *answers))
        return {**row, **media, **write_tools(record, meta.get("tools")), **meta.get("form", {}), **extra}
