"""Alpaca rows: `instruction`, `input`, `output`, and LLaMA-Factory's `system` and `history` beside them."""

from __future__ import annotations

from gym_data.formats._base import Row, RowError, text_of, type_name
from gym_data.formats._meta import dump_meta, load_meta
from gym_data.record import Candidate, Message, Record, Source, text_message

_KEYS = ("instruction", "input", "output", "system", "history")


class Alpaca:
    """`{"instruction", "input", "output", "system", "history": [[user, assistant], ...]}`

    The user's turn is the instruction, and, when there is input, a line break and the input. The turns of `history` are
    turns like any other: trained under `train_on: all`, not under `last`.
    """

    name = "alpaca"
    signature = "instruction, output"

    def matches(self, row: Row) -> bool:
        return isinstance(row.get("instruction"), str) and "output" in row

    def to_record(self, row: Row, source: Source) -> Record:
        instruction, output = text_of(row, "instruction"), text_of(row, "output")
        extra_input, system = row.get("input"), row.get("system")
        for key, value in (("input", extra_input), ("system", system)):
            if value is not None and not isinstance(value, str):
                raise RowError(f"{key} must be text, not {type_name(value)}", key)
        history = row.get("history")
        if history is not None and not isinstance(history, list):
            raise RowError(f"history must be a list of pairs, not {type_name(history)}", "history")
        prompt: list[Message] = [text_message("system", system)] if system else []
        for index, turn in enumerate(history or []):
            if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
                raise RowError("each turn of history is a pair of texts", f"history[{index}]")
            prompt += (text_message("user", turn[0]), text_message("assistant", turn[1]))
        prompt.append(text_message("user", f"{instruction}\n{extra_input}" if extra_input else instruction))
        form = {key: row[key] for key in ("input", "system", "history") if key in row and not row[key]}
        return Record(
            "chat",
            tuple(prompt),
            (Candidate((text_message("assistant", output),)),),
            meta_json=dump_meta(
                input=extra_input,
                form=form,
                extra={key: value for key, value in row.items() if key not in _KEYS},
            ),
            source=source,
        )

    def export(self, record: Record) -> Row:
        meta = load_meta(record.meta_json)
        messages = record.messages
        instruction, extra_input = messages[-2].text, meta.get("input")
        row: Row = {"output": messages[-1].text}
        if extra_input and instruction.endswith(f"\n{extra_input}"):
            row["input"] = extra_input
            instruction = instruction[: -len(extra_input) - 1]
        row["instruction"] = instruction
        rest = messages[:-2]
        if rest and rest[0].role == "system":
            row["system"] = rest[0].text
            rest = rest[1:]
        if rest:
            row["history"] = [[a.text, b.text] for a, b in zip(rest[::2], rest[1::2], strict=True)]
        return {**row, **meta.get("form", {}), **meta.get("extra", {})}
