"""Chosen and rejected answers, as TRL and many hub data sets write them."""

from __future__ import annotations

from typing import Any

from gym_data.formats._base import Row, RowError, type_name
from gym_data.formats._meta import dump_meta, load_meta
from gym_data.formats._sides import Hint, read_side, read_tools, rest_of, tools_hint, write_side, write_tools
from gym_data.formats.openai import messages_to_openai
from gym_data.record import Candidate, Message, Record, Source

_SCORES = ("score_chosen", "score_rejected")


class Preference:
    """`{"prompt": text | [message], "chosen": text | [message], "rejected": text | [message]}`

    Where both sides are whole chats, what they share at the start is the prompt. `score_chosen` and `score_rejected`
    are the candidates' scores.
    """

    name = "preference"
    signature = "chosen, rejected"
    fields: tuple[str, ...] = ("prompt", "chosen", "rejected", "tools", *_SCORES)

    def matches(self, row: Row) -> bool:
        return "chosen" in row and "rejected" in row and "conversations" not in row and "instruction" not in row

    def to_record(self, row: Row, source: Source) -> Record:
        chosen, rejected = row.get("chosen"), row.get("rejected")
        for key, value in (("chosen", chosen), ("rejected", rejected)):
            if not isinstance(value, str | list):
                raise RowError(f"{key} must be text or a list of messages, not {type_name(value)}", key)
        better, better_hint = read_side(chosen, "assistant", "chosen")
        worse, worse_hint = read_side(rejected, "assistant", "rejected")
        prompt, hint = self._prompt(row, better, worse)
        shared = hint.get("shared", 0)
        scores = [_score(row, key) for key in _SCORES]
        return Record(
            "preference",
            tuple(prompt),
            (
                Candidate(tuple(better[shared:]), rank=0, score=scores[0]),
                Candidate(tuple(worse[shared:]), rank=1, score=scores[1]),
            ),
            tools_json=read_tools(row),
            meta_json=dump_meta(
                prompt=hint,
                chosen=better_hint,
                rejected=worse_hint,
                tools=tools_hint(row),
                nulls=[key for key in _SCORES if key in row and row[key] is None],
                extra=rest_of(row, self.fields),
            ),
            source=source,
        )

    def _prompt(self, row: Row, better: list[Message], worse: list[Message]) -> tuple[list[Message], Hint]:
        """The prompt, and how it was written; `shared` messages of both sides belong to it."""
        sides = isinstance(row["chosen"], list) and isinstance(row["rejected"], list)
        shared = _num_shared(better, worse) if sides else 0
        if "prompt" not in row:
            if not shared:
                raise RowError(
                    "there is no prompt, and chosen and rejected share no message",
                    "prompt",
                    "Name the prompt's column: columns: {prompt: ...}.",
                )
            return better[:shared], {"form": "missing", "shared": shared}
        given, hint = read_side(row["prompt"], "user", "prompt")
        if not shared:
            return given, {"form": "text"} if hint is None else {"form": "list", **hint}
        # Both sides repeat the chat (UltraFeedback): the prompt column must say the same, or nothing may be left out.
        repeated = better[:shared]
        if hint is None and any(message.role == "user" and message.text == given[0].text for message in repeated):
            return repeated, {"form": "repeated", "shared": shared, "text": row["prompt"]}
        if hint is not None and given == repeated:
            return repeated, {"form": "repeated", "shared": shared, "text": row["prompt"]}
        if repeated[0].role in ("assistant", "tool"):
            return given + repeated, {
                "form": "list" if hint else "text",
                "shared": shared,
                "own": len(given),
                **(hint or {}),
            }
        raise RowError("the prompt differs from the start of chosen and rejected", "prompt")

    def export(self, record: Record) -> Row:
        meta = load_meta(record.meta_json)
        hint: dict[str, Any] = meta.get("prompt", {})
        chosen, rejected = record.candidates
        shared = hint.get("shared", 0)
        own = hint.get("own", 0)
        repeated = record.prompt[own:] if shared else ()
        row: Row = {
            "chosen": self._side((*repeated, *chosen.messages), meta.get("chosen")),
            "rejected": self._side((*repeated, *rejected.messages), meta.get("rejected")),
        }
        form = hint.get("form", "text" if len(record.prompt) == 1 else "list")
        if form == "repeated":
            row["prompt"] = hint["text"]
        elif form != "missing":
            prompt = record.prompt[: len(record.prompt) - len(repeated)]
            row["prompt"] = write_side(prompt, None if form == "text" else hint)
        for key, candidate in zip(_SCORES, (chosen, rejected), strict=True):
            if candidate.score is not None:
                row[key] = candidate.score
        return {
            **row,
            **write_tools(record, meta.get("tools")),
            **dict.fromkeys(meta.get("nulls", [])),
            **meta.get("extra", {}),
        }

    @staticmethod
    def _side(messages: tuple[Message, ...], hint: Hint | None) -> Any:
        return write_side(messages, hint) if hint is None else messages_to_openai(messages, hint["messages"])


def _num_shared(one: list[Message], other: list[Message]) -> int:
    """Equal messages at the start; each side keeps at least its last one."""
    limit = min(len(one), len(other)) - 1
    return next((i for i in range(limit) if one[i] != other[i]), max(0, limit))


def _score(row: Row, key: str) -> float | None:
    score = row.get(key)
    if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
        raise RowError(f"{key} must be a number, not {type_name(score)}", key)
    return score
