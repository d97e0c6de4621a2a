"""Guards real data sets, whole: GSM8K and the self-instruct seeds are prepared with every row accounted for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gym_data import Prepared, Tokenizer, prepare
from gym_sdk.spec.data import DataSource, DataSpec, EvalSplit

DATA = Path(os.environ.get("GYM_KNOWN_DATA") or Path(__file__).parents[3] / "shared" / "data")
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="needs the data sets, beside the repository or elsewhere")


def prepared(data: DataSpec, folder: Path, cache: Path) -> Prepared:
    return prepare(data, folder, cache_dir=cache, seed=0)


def test_gsm8k_is_prepared_whole_and_trains_every_answer(smollm2_folder: Path, tmp_path: Path) -> None:
    path = DATA / "gsm8k" / "train.jsonl"
    held_out = DataSource(source=str(DATA / "gsm8k" / "test.jsonl"))
    data = DataSpec(train=[DataSource(source=str(path))], eval=EvalSplit(sources=[held_out]))
    made = prepared(data, smollm2_folder, tmp_path)
    report = made.report
    assert (report.rows_in, report.rows_train, report.rows_eval, report.rows_dropped) == (8792, 7473, 1319, 0)
    assert (len(made.train), report.rows_truncated) == (7473, 0)
    assert report.sources[0]["format"] == "prompt_completion"
    assert report.pack_fill > 0.98
    tokenizer = Tokenizer.from_folder(smollm2_folder)
    answers = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    for document, answer in zip(made.train, answers, strict=True):
        assert tokenizer.decode(document.ids[document.loss_mask == 1]) == f"{answer}<|im_end|>"


def test_self_instruct_seeds_are_prepared_whole_through_a_column_path(smollm2_folder: Path, tmp_path: Path) -> None:
    columns = {"instruction": "instruction", "input": "instances[].input", "output": "instances[].output"}
    path = DATA / "self-instruct" / "seed_tasks.jsonl"
    made = prepared(DataSpec(train=[DataSource(source=str(path), columns=columns)]), smollm2_folder, tmp_path)
    report = made.report
    assert (report.rows_in, report.rows_train, report.rows_dropped, report.rows_truncated) == (175, 175, 0, 0)
    assert report.sources[0]["format"] == "alpaca"
    tokenizer = Tokenizer.from_folder(smollm2_folder)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for document, row in zip(made.train, rows, strict=True):
        (instance,) = row["instances"]
        assert tokenizer.decode(document.ids[document.loss_mask == 1]) == f"{instance['output']}<|im_end|>"
        asked = tokenizer.decode(document.ids[document.loss_mask == 0])
        assert row["instruction"] in asked
        assert instance["input"] in asked
