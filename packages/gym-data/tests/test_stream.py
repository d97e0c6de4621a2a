"""Guards rows that are read while training: the same tokens after a kill, every row once a pass, a quick first row."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gym_data import RowStream, Tokenizer, open_stream
from gym_data.sources import jsonl
from gym_sdk.errors import DataError
from gym_sdk.spec.data import DataSource, DataSpec, EvalSplit

Row = tuple[tuple[bytes, bytes, int, int], ...]


def chat(number: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"answer {number} " * (1 + number % 5)},
        ]
    }


def write(path: Path, rows: list[dict[str, Any]]) -> DataSource:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return DataSource(source=str(path))


def taken(stream: RowStream, count: int) -> list[Row]:
    """The next rows, every byte of them."""
    return [
        tuple((d.ids.tobytes(), d.loss_mask.tobytes(), d.row, int(d.role)) for d in next(stream)) for _ in range(count)
    ]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl.jsonl_chunks, "__defaults__", (2048,))


KILLED = """
import os, signal, sys
from pathlib import Path
from gym_data import RowStream
from gym_data.sources import jsonl
from gym_sdk.spec.data import DataSpec
jsonl.jsonl_chunks.__defaults__ = (2048,)
data, folder, out, count = DataSpec.model_validate_json(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
stream = RowStream(data, folder, seed=5)
with (out / "rows").open("wb") as file:
    for number in range(count):
        for document in next(stream):
            file.write(document.ids.tobytes() + document.loss_mask.tobytes())
    stream.save(out / "position")
    file.flush()
    for _ in range(7):
        next(stream)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("kind", "count"),
    [("one", 1), ("one", 95), ("mixed", 40), ("mixed", 230), ("wrapped", 30), ("wrapped", 130)],
)
def test_a_killed_reader_goes_on_with_the_same_tokens_bit_for_bit(
    smollm2_folder: Path, tmp_path: Path, kind: str, count: int
) -> None:
    rows = [chat(i) for i in range(100)]
    if kind == "one":
        data = DataSpec(train=[write(tmp_path / "a.jsonl.gz", rows)], shuffle_buffer_rows=16)
    elif kind == "mixed":
        (tmp_path / "t.csv").write_text("prompt,completion\n" + "".join(f"q{i},a{i}\n" for i in range(30)))
        sources = [
            write(tmp_path / "a.jsonl", rows[:60]).model_copy(update={"weight": 2.0}),
            write(tmp_path / "b.jsonl", rows[60:]).model_copy(update={"limit": 25}),
            DataSource(source=str(tmp_path / "t.csv"), weight=0.5),
        ]
        data = DataSpec(train=sources, shuffle_buffer_rows=16)
    else:
        texts = [{"text": f"The kea number {i} flew over the ridge. " * (1 + i % 9)} for i in range(80)]
        source = write(tmp_path / "t.jsonl", texts)
        data = DataSpec(train=[source], packing_strategy="wrapped", max_length=64, shuffle_buffer_rows=16)
    whole = RowStream(data, smollm2_folder, seed=5)
    expected = taken(whole, count + 150)
    out = tmp_path / "killed"
    out.mkdir()
    command = [sys.executable, "-c", KILLED, data.model_dump_json(), str(smollm2_folder), str(out), str(count)]
    assert subprocess.run(command, check=False).returncode == -9
    before = b"".join(ids + mask for row in expected[:count] for ids, mask, _, _ in row)
    assert (out / "rows").read_bytes() == before
    resumed = RowStream(data, smollm2_folder, seed=5)
    resumed.restore(out / "position")
    assert taken(resumed, 150) == expected[count:]
    assert resumed.report.to_json() == whole.report.to_json(), "the counts of the resumed stream differ"


@pytest.mark.usefixtures("small_chunks")
def test_every_row_is_seen_once_a_pass_in_another_order_each_time(smollm2_folder: Path, tmp_path: Path) -> None:
    rows = [chat(i) for i in range(100)]
    data = DataSpec(train=[write(tmp_path / "a.jsonl", rows)], shuffle_buffer_rows=16)
    stream = RowStream(data, smollm2_folder, seed=0)
    passes = [[row[0][2] for row in taken(stream, 100)] for _ in range(3)]
    assert all(sorted(numbers) == list(range(1, 101)) for numbers in passes)
    assert passes[0] != passes[1] != passes[2] != list(range(1, 101))
    assert passes[0].index(100) >= 100 - 16, "a row left before it can have been read"
    in_order = RowStream(data.model_copy(update={"shuffle_buffer_rows": 1}), smollm2_folder, seed=0)
    assert [row[0][2] for row in taken(in_order, 100)] == list(range(1, 101))


@pytest.mark.usefixtures("small_chunks")
def test_the_first_row_is_there_before_the_file_is_read(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a.jsonl", [chat(i) for i in range(3000)])
    read: list[int] = []
    chunks = jsonl.jsonl_chunks

    def counted(*args: Any, **options: Any) -> Any:
        for chunk in chunks(*args, **options):
            read.append(len(chunk.data))
            yield chunk

    monkeypatch.setattr("gym_data.sources.inputs.jsonl_chunks", counted)
    stream = RowStream(DataSpec(train=[source], shuffle_buffer_rows=32), smollm2_folder, seed=0)
    assert read == []
    next(stream)
    assert sum(read) < 0.05 * Path(source.source).stat().st_size


def test_sources_are_drawn_by_weight_and_each_begins_again(smollm2_folder: Path, tmp_path: Path) -> None:
    often = write(tmp_path / "a.jsonl", [chat(i) for i in range(10)]).model_copy(update={"weight": 3.0})
    seldom = write(tmp_path / "b.jsonl", [chat(i) for i in range(1000, 1010)])
    stream = RowStream(DataSpec(train=[often, seldom], shuffle_buffer_rows=4), smollm2_folder, seed=0)
    tokenizer = Tokenizer.from_folder(smollm2_folder)
    texts = [tokenizer.decode(next(stream)[0].ids) for _ in range(800)]
    share = sum("question 100" in text for text in texts) / 800
    assert 0.2 < share < 0.3


def test_evaluation_rows_are_never_trained_on_and_are_prepared_whole(smollm2_folder: Path, tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", [chat(i) for i in range(20)])
    held = write(tmp_path / "e.jsonl", [chat(3), chat(7), chat(99)])
    data = DataSpec(train=[train], eval=EvalSplit(sources=[held]), shuffle_buffer_rows=8)
    streamed = open_stream(data, smollm2_folder, cache_dir=tmp_path, seed=0)
    assert streamed.eval is not None
    assert len(streamed.eval) == 3
    numbers = [row[0][2] for row in taken(streamed.train, 36)]
    assert sorted(numbers) == sorted([n for n in range(1, 21) if n not in (4, 8)] * 2)
    assert (streamed.report.rows_eval, len(streamed.report.samples)) == (3, 3)
    assert streamed.preview.num_rows == 8


def test_the_position_in_other_data_is_refused(smollm2_folder: Path, tmp_path: Path) -> None:
    data = DataSpec(train=[write(tmp_path / "a.jsonl", [chat(i) for i in range(20)])])
    stream = RowStream(data, smollm2_folder, seed=0)
    next(stream)
    stream.save(tmp_path / "position")
    write(tmp_path / "a.jsonl", [chat(i) for i in range(1, 21)])
    with pytest.raises(DataError, match="is not what the position belongs to"):
        RowStream(data, smollm2_folder, seed=0).restore(tmp_path / "position")
    with pytest.raises(DataError, match="the position in the data cannot be read"):
        stream.restore(tmp_path / "nowhere")


def test_a_broken_row_is_an_error_with_its_place_when_it_is_met(smollm2_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(chat(i)) + "\n" for i in range(9)) + '{"messages": [\n')
    stream = RowStream(DataSpec(train=[DataSource(source=str(path))]), smollm2_folder, seed=0)
    with pytest.raises(DataError, match=r"a.jsonl:10:\d+: not valid JSON"):
        next(stream)
    mixed = write(tmp_path / "m.jsonl", [chat(0), {"instruction": "i", "output": "o"}])
    with pytest.raises(DataError, match="rows of different formats: openai: row 1; alpaca: row 2"):
        next(RowStream(DataSpec(train=[mixed]), smollm2_folder, seed=0))
    long = DataSpec(train=[write(tmp_path / "l.jsonl", [chat(4)])], max_length=8)
    with pytest.raises(DataError, match="no training row is left of this source"):
        next(RowStream(long, smollm2_folder, seed=0))


def test_streamed_and_prepared_rows_are_the_same(smollm2_folder: Path, tmp_path: Path) -> None:
    from gym_data import prepare

    data = DataSpec(train=[write(tmp_path / "a.jsonl", [chat(i) for i in range(50)])], shuffle_buffer_rows=8)
    prepared = prepare(data, smollm2_folder, cache_dir=tmp_path, seed=0)
    stream = RowStream(data, smollm2_folder, seed=0)
    streamed = sorted((next(stream)[0] for _ in range(50)), key=lambda document: document.row)
    for one, other in zip(prepared.train, streamed, strict=True):
        assert np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.loss_mask, other.loss_mask)
    for name in ("rows_in", "rows_train", "tokens", "trained_tokens"):
        assert getattr(prepared.report, name) == getattr(stream.report, name)
