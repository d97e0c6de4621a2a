"""Questions with reference answers, and the three splits that must not meet: training, gate, test."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_data import Record, read_records
from gym_data.formats.openai import messages_to_openai
from gym_data.sources.jsonl import read_jsonl
from gym_sdk.errors import DataError, Where
from gym_sdk.spec import DataSource, RunSpec
from gym_sdk.spec.training_free import TrainingFreeGrpo

REFERENCE_KEYS = ("answer", "reference", "ground_truth", "solution", "target")
"""Where the reference may stand in a row's reward fields."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt and the answer it is verified against."""

    messages: tuple[dict[str, Any], ...]
    reference: str | None
    where: Where

    @property
    def id(self) -> str:
        """Of the prompt alone: rows that ask the same stand in the same split."""
        content = json.dumps(self.messages, sort_keys=True, ensure_ascii=False)
        return "q" + hashlib.sha256(" ".join(content.split()).encode()).hexdigest()[:12]

    @property
    def text(self) -> str:
        """What is asked, for the teacher: the last user message, or all of a conversation."""
        parts = [(str(m.get("role")), _text(m.get("content"))) for m in self.messages if m.get("role") != "system"]
        return parts[-1][1] if len(parts) == 1 else "\n".join(f"{role}: {text}" for role, text in parts)


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Disjoint by content."""

    train: tuple[Question, ...]
    gate: tuple[Question, ...]
    test: tuple[Question, ...]
    num_repeated: int
    """Rows left out because an earlier row asks the same."""


def load_splits(spec: RunSpec, method: TrainingFreeGrpo) -> Splits:
    """Read, deduplicate and split the questions of a run.

    `data.eval` gives the test questions: files of their own, or a share of the training rows. The gate's share is taken
    from what remains. Raises DataError: rows without answers where they are needed, a split that is too small.
    """
    seen: set[str] = set()
    rows = list(_read_all(spec.data.train, method))
    test_rows = list(_read_all(spec.data.eval.sources, method))
    # Test rows come first: a question of the test split never stands in another one.
    test = _unique(test_rows, seen)
    train = _unique(rows, seen)
    if spec.data.eval.split is not None:
        train, test = _split(train, spec.data.eval.split, spec.seed, "test")
    gate: list[Question] = []
    if method.gate.has_test:
        train, gate = _split(train, method.gate.share, spec.seed, "gate")
    if not train:
        raise DataError("no training questions are left", hint="give more rows, or smaller held-out shares")
    if method.gate.has_test and len(gate) < method.gate.min_questions:
        raise DataError(
            f"the gate has {len(gate)} questions, and needs {method.gate.min_questions} to tell a gain from luck",
            where=Where(path="method.gate.share"),
            hint="give more rows, raise method.gate.share, or set method.gate.held_out to false",
        )
    if method.ground_truth == "answers":
        _need_references(train, "method.ground_truth: majority or critique trains without them")
    _need_references(gate, "set method.gate.held_out to false to do without held-out questions")
    _need_references(test, "leave data.eval out to train without a measurement")
    return Splits(
        train=tuple(train),
        gate=tuple(gate),
        test=tuple(test),
        num_repeated=len(rows) + len(test_rows) - len(train) - len(gate) - len(test),
    )


def epoch_order(questions: Sequence[Question], seed: int, epoch: int) -> list[Question]:
    """The training questions of an epoch, shuffled by content: the order of the file has no effect."""
    ordered = sorted(questions, key=lambda question: question.id)
    random.Random(f"order/{seed}/{epoch}").shuffle(ordered)
    return ordered


def _read_all(sources: Iterable[DataSource], method: TrainingFreeGrpo) -> Iterator[Question]:
    for source in sources:
        if method.question_field is None:
            for record in read_records(source):
                yield _from_record(record, method)
        else:
            yield from _from_fields(source, method.question_field, method)


def _from_fields(source: DataSource, question_field: str, method: TrainingFreeGrpo) -> Iterator[Question]:
    path = Path(source.source).expanduser()
    if not path.is_file():
        raise DataError("the data file does not exist", where=Where(file=str(path)))
    for count, (line, row) in enumerate(read_jsonl(path), 1):
        if source.limit is not None and count > source.limit:
            return
        where = Where(file=str(path), line=line)
        for name in filter(None, (question_field, method.answer_field)):
            if name not in row:
                keys = ", ".join(map(repr, row))
                raise DataError(f"the row has no field {name!r}; it has {keys}", where=where)
        asked = row[question_field]
        if not isinstance(asked, str) or not asked.strip():
            raise DataError(f"the field {question_field!r} must be text that is not empty", where=where)
        answer = row[method.answer_field] if method.answer_field else None
        yield _question([{"role": "user", "content": asked}], _reference_text(answer), where, method)


def _from_record(record: Record, method: TrainingFreeGrpo) -> Question:
    source = record.source
    where = Where(file=source.uri, line=source.row) if source else Where()
    reference = None
    if record.reward_json is not None:
        reward = json.loads(record.reward_json)
        found = [reward[key] for key in REFERENCE_KEYS if key in reward] if isinstance(reward, dict) else [reward]
        reference = _reference_text(found[0]) if found else None
    elif record.candidates and record.candidates[0].messages:
        reference = record.candidates[0].messages[-1].text
    messages = messages_to_openai(record.prompt, {})
    if not any(message.get("role") == "user" for message in messages):
        raise DataError("the row has no user message to answer", where=where)
    return _question(messages, reference, where, method)


def _question(
    messages: list[dict[str, Any]], reference: str | None, where: Where, method: TrainingFreeGrpo
) -> Question:
    if method.instruction:
        if messages[0].get("role") == "system":
            messages = [
                {"role": "system", "content": f"{messages[0]['content']}\n\n{method.instruction}"},
                *messages[1:],
            ]
        else:
            messages = [{"role": "system", "content": method.instruction}, *messages]
    blank = reference is None or not reference.strip()
    return Question(messages=tuple(messages), reference=None if blank else reference, where=where)


def _reference_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", f"({part.get('type')})")) for part in content if isinstance(part, dict))
    return str(content or "")


def _unique(questions: Iterable[Question], seen: set[str]) -> list[Question]:
    kept: list[Question] = []
    for question in questions:
        if question.id not in seen:
            seen.add(question.id)
            kept.append(question)
    return kept


def _split(questions: list[Question], share: float, seed: int, name: str) -> tuple[list[Question], list[Question]]:
    """The rest, and a share drawn by content."""
    ordered = sorted(questions, key=lambda question: question.id)
    random.Random(f"{name}/{seed}").shuffle(ordered)
    count = round(share * len(ordered))
    return ordered[count:], ordered[:count]


def _need_references(questions: Sequence[Question], hint: str) -> None:
    missing = [question for question in questions if question.reference is None]
    if missing:
        more = f" (and {len(missing) - 1} more rows)" if len(missing) > 1 else ""
        raise DataError(f"the row has no reference answer{more}", where=missing[0].where, hint=hint)
