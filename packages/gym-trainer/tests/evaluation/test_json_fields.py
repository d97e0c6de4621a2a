"""Guards the evaluation's verdicts and intervals: what counts as right, and how sure a share is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gym_data.record import text_message
from gym_sdk.errors import DataError
from gym_sdk.spec import DataSource, JsonFieldsTask
from gym_trainer.evaluation.intervals import clustered_share, share, wilson
from gym_trainer.evaluation.json_fields import Question, judge, questions, summarise

EXPECTED = {"species": "lion", "count": 7, "place": None, "seen": True}


def question(expected: dict[str, Any] = EXPECTED) -> Question:
    return Question(messages=(text_message("user", "7 lions"),), tools_json=None, expected=expected, place="rows:1")


@pytest.mark.parametrize(
    ("text", "valid", "wrong"),
    [
        ('{"species":"lion","count":7,"place":null,"seen":true}', True, ()),
        ('  {"seen": true, "count": 7.0, "place": null, "species": "lion"}\n', True, ()),
        ('{"species":"lion","count":"7","place":null,"seen":true}', True, ("count",)),
        ('{"species":"lion","count":7,"place":"null","seen":1}', True, ("place", "seen")),
        ('{"species":"lion","count":7,"seen":true}', True, ("place",)),
        ('{"species":"lion","count":7,"place":null,"seen":true,"mood":"calm"}', True, ("+mood",)),
        ('{"species":"Lion","count":7,"place":null,"seen":true}', True, ("species",)),
        ('Here you are: {"species":"lion"}', False, tuple(EXPECTED)),
        ('{"species":"lion","species":"lion","count":7,"place":null,"seen":true}', False, tuple(EXPECTED)),
        ('{"species":"lion","count":NaN,"place":null,"seen":true}', False, tuple(EXPECTED)),
        ('["lion"]', False, tuple(EXPECTED)),
        ('{"species":"lion"', False, tuple(EXPECTED)),
        ("", False, tuple(EXPECTED)),
    ],
)
def test_an_answer_is_right_field_by_field_as_json(text: str, valid: bool, wrong: tuple[str, ...]) -> None:
    answer = judge(question(), text, num_tokens=9, ended=True)
    assert answer.valid is valid
    assert answer.wrong == wrong
    assert set(answer.right) == set(EXPECTED) - set(wrong) if valid else not answer.right


def test_shares_count_rows_fields_and_whole_records() -> None:
    right = json.dumps(EXPECTED)
    texts = [right, right.replace("7", "8"), "no JSON"]
    result = summarise("t", [judge(question(), text, num_tokens=1, ended=True) for text in texts], 1.0)
    assert (result.valid.count, result.valid.total) == (2, 3)
    assert (result.field_accuracy.count, result.field_accuracy.total) == (7, 12)
    assert (result.exact.count, result.exact.total) == (1, 3)
    assert {name: value.count for name, value in result.by_field.items()} == {
        "species": 2,
        "count": 1,
        "place": 2,
        "seen": 2,
    }


@pytest.mark.parametrize(
    ("count", "total", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_intervals_are_wilsons(count: int, total: int, low: float, high: float) -> None:
    found = share(count, total)
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_fields_that_are_right_or_wrong_together_say_no_more_than_their_rows() -> None:
    together = clustered_share([(6, 6)] * 30 + [(0, 6)] * 10)
    assert (together.count, together.total) == (180, 240)
    # Six fields that always agree are one trial a row: the interval of 40 trials, up to the n / (n - 1) of a sample.
    low, high = wilson(0.75, 39)
    assert (together.low, together.high) == (pytest.approx(low, abs=2e-3), pytest.approx(high, abs=2e-3))
    spread = clustered_share([(5, 6), (4, 6)] * 20)
    assert spread.high - spread.low == pytest.approx(share(180, 240).high - share(180, 240).low, abs=1e-9)


@pytest.mark.parametrize(
    ("answer", "message"),
    [("not json", "not a JSON object"), ("[1]", "not a JSON object")],
)
def test_a_row_whose_answer_is_no_object_is_refused_with_its_line(tmp_path: Path, answer: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": a}]} for a in ("{}", answer)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=message) as error:
        questions(JsonFieldsTask(data=DataSource(source=str(path))))
    assert f"{path}:2" in str(error.value)
