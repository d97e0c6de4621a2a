"""Guards answers with nothing in them: a turn whose content is null would teach the model to say nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gym_data import Prepared, prepare
from gym_sdk.errors import DataError
from gym_sdk.spec.data import DataSource, DataSpec

QUESTION = {"role": "user", "content": "How many?"}
EMPTY: dict[str, Any] = {"role": "assistant", "content": None}
REASON = "an assistant turn without content, tool call or refusal"


def prepared(folder: Path, tmp_path: Path, *rows: dict[str, Any]) -> Prepared:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepare(DataSpec(train=[DataSource(source=str(path))]), folder, cache_dir=tmp_path / "cache", seed=0)


def test_a_null_answer_is_dropped_counted_and_named(smollm2_folder: Path, tmp_path: Path) -> None:
    good = {"messages": [QUESTION, {"role": "assistant", "content": "Two."}]}
    data = prepared(smollm2_folder, tmp_path, good, {"messages": [QUESTION, EMPTY]}, good | {"id": "3"})
    assert data.train.rows.tolist() == [1, 3]
    assert REASON in data.report.summary()
    assert "rows.jsonl:2" in json.dumps(json.loads(data.report.to_json()))


@pytest.mark.parametrize(
    "turn",
    [
        EMPTY | {"refusal": "I cannot say."},
        {"role": "assistant", "content": ""},
    ],
    ids=["refusal", "empty on purpose"],
)
def test_turns_that_say_something_stay(turn: Any, smollm2_folder: Path, tmp_path: Path) -> None:
    last = {"role": "assistant", "content": "Two."}
    row = {"messages": [QUESTION, turn, QUESTION, last]}
    assert REASON not in prepared(smollm2_folder, tmp_path, row).report.summary()


def test_data_of_nothing_but_null_answers_is_an_error(smollm2_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=REASON):
        prepared(smollm2_folder, tmp_path, {"messages": [QUESTION, EMPTY]})
