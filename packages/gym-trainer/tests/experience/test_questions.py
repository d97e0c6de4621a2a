"""Guards the questions: where they are read from, and that training, gate and test never meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gym_sdk.errors import DataError
from gym_sdk.spec import RunSpec, TrainingFreeGrpo, spec_from_data
from gym_trainer.experience.questions import Splits, epoch_order, load_splits


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def spec_of(train: str, data_eval: dict[str, Any] | None = None, seed: int = 0, **method: Any) -> RunSpec:
    return spec_from_data(
        {
            "model": {"source": "m"},
            "method": {"kind": "training_free_grpo", "reward": {"kind": "exact"}, **method},
            "data": {"train": [{"source": train}], "eval": data_eval or {}},
            "seed": seed,
        }
    )


def load(spec: RunSpec) -> Splits:
    assert isinstance(spec.method, TrainingFreeGrpo)
    return load_splits(spec, spec.method)


def pairs(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"Question {n}?", "completion": f"answer {n}"} for n in range(start, start + count)]


FIELDS = {"question_field": "context", "answer_field": "target"}


def test_rows_of_any_known_format_are_questions_with_references(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": f"{n}!"},
            ]
        }
        for n in range(3)
    ]
    splits = load(spec_of(write(tmp_path / "t.jsonl", rows), gate={"enabled": False}, instruction="Think."))
    found = {question.text: question for question in splits.train}
    assert sorted(found) == ["0?", "1?", "2?"]
    assert found["1?"].reference == "1!"
    assert found["1?"].messages == (
        {"role": "system", "content": "Be brief.\n\nThink."},
        {"role": "user", "content": "1?"},
    )


def test_named_fields_read_any_shape_and_keep_values(tmp_path: Path) -> None:
    rows = [
        {"context": "2 + 2?", "target": "4.0"},
        {"context": "3?", "target": 3},
        {"context": "J?", "target": {"a": 1}},
    ]
    splits = load(spec_of(write(tmp_path / "t.jsonl", rows), gate={"enabled": False}, **FIELDS))
    assert {q.text: q.reference for q in splits.train} == {"2 + 2?": "4.0", "3?": "3", "J?": '{"a": 1}'}
    assert splits.train[0].where.line in (1, 2, 3)


def test_splits_are_disjoint_by_content_and_complete(tmp_path: Path) -> None:
    rows = pairs(200) + pairs(40)
    splits = load(spec_of(write(tmp_path / "t.jsonl", rows), {"split": 0.25}))
    ids = [{question.id for question in part} for part in (splits.train, splits.gate, splits.test)]
    assert [len(part) for part in ids] == [90, 60, 50]
    assert len(set.union(*ids)) == 200
    assert splits.num_repeated == 40


def test_a_test_question_never_stands_in_training_whatever_file_it_is_in(tmp_path: Path) -> None:
    test = write(tmp_path / "e.jsonl", pairs(10))
    spec = spec_of(write(tmp_path / "t.jsonl", pairs(100)), {"sources": [{"source": test}]})
    splits = load(spec)
    assert len(splits.test) == 10
    assert not {q.id for q in splits.test} & {q.id for q in (*splits.train, *splits.gate)}


def test_splits_and_orders_depend_on_content_and_seed_only(tmp_path: Path) -> None:
    rows = pairs(100)
    one = load(spec_of(write(tmp_path / "a.jsonl", rows), {"split": 0.2}))
    other = load(spec_of(write(tmp_path / "b.jsonl", rows[::-1]), {"split": 0.2}))
    assert [q.id for q in one.gate] == [q.id for q in other.gate]
    assert [q.id for q in one.test] == [q.id for q in other.test]
    orders = [[q.id for q in epoch_order(part.train, 0, epoch)] for part in (one, other) for epoch in (0, 1)]
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])
    assert {q.id for q in load(spec_of(str(tmp_path / "a.jsonl"), {"split": 0.2}, seed=1)).gate} != {
        q.id for q in one.gate
    }


@pytest.mark.parametrize(
    ("rows", "method", "message"),
    [
        ([{"context": "a?"}] * 1, {**FIELDS}, "t.jsonl:1: the row has no field 'target'; it has 'context'"),
        ([{"context": " ", "target": "x"}], {**FIELDS}, "must be text that is not empty"),
        (
            [{"context": f"{n}?"} for n in range(3)],
            {"question_field": "context", "gate": {"enabled": False}},
            "the row has no reference answer (and 2 more rows)",
        ),
        (pairs(20), {}, "the gate has 8 questions, and needs 30"),
        ([{"odd": 1}], {}, "the shape of this row is not known"),
    ],
    ids=["missing field", "empty", "no answers", "small gate", "unknown shape"],
)
def test_what_cannot_be_used_is_one_message_with_its_place(
    tmp_path: Path, rows: list[dict[str, Any]], method: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        load(spec_of(write(tmp_path / "t.jsonl", rows), **method))
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_rows_without_answers_train_label_free(tmp_path: Path) -> None:
    rows = [{"context": f"{n}?"} for n in range(3)]
    method = {
        "question_field": "context",
        "ground_truth": "majority",
        "gate": {"enabled": False},
    }
    assert len(load(spec_of(write(tmp_path / "t.jsonl", rows), **method)).train) == 3
