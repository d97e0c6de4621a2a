"""Answers that are JSON objects: are they valid, and which of their fields are right?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from gym_data import Message, Record, read_records
from gym_sdk.errors import DataError, Where
from gym_sdk.spec import JsonFieldsTask
from gym_trainer.evaluation.intervals import Share, clustered_share, share


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt and the object that its answer should be."""

    messages: tuple[Message, ...]
    tools_json: str | None
    expected: dict[str, Any]
    place: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the model said to a question."""

    place: str
    prompt: str
    """The last message, for people."""
    expected: dict[str, Any]
    text: str
    valid: bool
    right: tuple[str, ...]
    wrong: tuple[str, ...]
    num_tokens: int
    ended: bool
    """It stopped by itself, before the limit."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class JsonFieldsResult:
    """The task's numbers, with every answer they come from."""

    name: str
    valid: Share
    field_accuracy: Share
    exact: Share
    """Rows with every field right and no other."""
    by_field: dict[str, Share]
    ended: Share
    answers: tuple[Answer, ...]
    duration_s: float

    def to_json(self) -> dict[str, Any]:
        """Plain data, as it is kept with the run."""
        return {
            "kind": "json_fields",
            "name": self.name,
            "num_rows": len(self.answers),
            "valid": self.valid.to_json(),
            "field_accuracy": self.field_accuracy.to_json(),
            "exact": self.exact.to_json(),
            "by_field": {name: value.to_json() for name, value in self.by_field.items()},
            "ended": self.ended.to_json(),
            "duration_s": self.duration_s,
            "answers": [answer.to_json() for answer in self.answers],
        }


def questions(task: JsonFieldsTask) -> list[Question]:
    """The held-out rows.

    Raises:
        DataError: a row without a final assistant turn, or whose answer is not a JSON object.
    """
    found = [_question(record) for record in islice(_records(task), task.num_rows)]
    if not found:
        raise DataError("no row to evaluate on", where=Where(file=task.data.source))
    return found


def _records(task: JsonFieldsTask) -> Iterator[Record]:
    return iter(read_records(task.data))


def _question(record: Record) -> Question:
    where = Where(file=record.source.uri, line=record.source.row) if record.source else None
    messages = tuple(record.messages)
    if not messages or messages[-1].role != "assistant":
        raise DataError("an evaluation row ends with the expected answer of the assistant", where=where)
    expected = parse_object(messages[-1].text)
    if expected is None:
        raise DataError(
            "the expected answer is not a JSON object",
            where=where,
            hint="the task json_fields compares objects field by field",
        )
    return Question(
        messages=messages[:-1],
        tools_json=record.tools_json,
        expected=expected,
        place=str(where) if where else "",
    )


def judge(question: Question, text: str, *, num_tokens: int, ended: bool) -> Answer:
    """Compare an answer with what was expected. Values are compared as JSON: 7 is not "7", 1 is not true."""
    got = parse_object(text)
    right = tuple(name for name, value in question.expected.items() if got is not None and _same(got, name, value))
    return Answer(
        place=question.place,
        prompt=question.messages[-1].text if question.messages else "",
        expected=question.expected,
        text=text,
        valid=got is not None,
        right=right,
        wrong=tuple(name for name in question.expected if name not in right)
        + tuple(f"+{name}" for name in (got or {}) if name not in question.expected),
        num_tokens=num_tokens,
        ended=ended,
    )


def summarise(name: str, answers: list[Answer], duration_s: float) -> JsonFieldsResult:
    """The task's shares. A field that is missing, or of an answer that is no object, is wrong."""
    fields = list(dict.fromkeys(field for answer in answers for field in answer.expected))
    by_field = {}
    for field in fields:
        asked = [answer for answer in answers if field in answer.expected]
        by_field[field] = share(sum(field in answer.right for answer in asked), len(asked))
    return JsonFieldsResult(
        name=name,
        valid=share(sum(answer.valid for answer in answers), len(answers)),
        field_accuracy=clustered_share([(len(answer.right), len(answer.expected)) for answer in answers]),
        exact=share(sum(answer.valid and not answer.wrong for answer in answers), len(answers)),
        by_field=by_field,
        ended=share(sum(answer.ended for answer in answers), len(answers)),
        answers=tuple(answers),
        duration_s=duration_s,
    )


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object that the whole text is, white space apart; None for anything else, NaN, and a key given twice."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a key stands twice")
        return dict(pairs)

    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        value = json.loads(text.strip(), object_pairs_hook=no_duplicates, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _same(got: dict[str, Any], name: str, expected: Any) -> bool:
    return name in got and _canonical(got[name]) == _canonical(expected)


def _canonical(value: Any) -> str:
    """JSON text under which 1 and 1.0 are one number, and 1, true and "1" three values."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
