"""Guards the data benchmark: its figures are there, belong together, and have the names that scripts read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gym_data.bench import bench
from gym_data.bench.cores import bench_cores
from gym_data.bench.made_up import write_chats
from gym_sdk.cli._root import run as gym


def test_the_benchmark_measures_every_stage(smollm2_folder: Path, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "Two."}]}
    file = tmp_path / "chats.jsonl"
    file.write_text((json.dumps(row) + "\n") * 200)
    found = bench(smollm2_folder, file, repetitions=1)
    assert found.rows == 200
    assert found.quick_share == 1.0
    assert found.tokenizer_path.startswith("tokenizers ")
    rates = [value for name, value in found.to_data().items() if name.endswith("_tokens_per_s")]
    assert len(rates) == 6
    assert all(rate > 0 for rate in rates)
    assert found.end_to_end_share_of_raw == pytest.approx(
        found.end_to_end_tokens_per_s / found.raw_tokenizer_tokens_per_s
    )


@pytest.mark.parametrize("command", [["data", "bench"], ["bench", "data"]])
def test_both_names_of_the_command_print_the_same_fields(
    smollm2_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    file = write_chats(tmp_path / "chats.jsonl", num_rows=20)
    assert gym([*command, str(smollm2_folder), str(file), "--repetitions", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 20
    assert found["end_to_end_tokens_per_s"] > 0


def test_two_cores_and_one_prepare_the_same_file(smollm2_folder: Path, tmp_path: Path) -> None:
    file = write_chats(tmp_path / "chats.jsonl", num_rows=20)
    found = bench_cores(smollm2_folder, file, repetitions=1)
    assert (found.repetitions, found.file_bytes) == (1, file.stat().st_size)
    assert found.two_cores_speedup == found.speedups[0] > 0


def test_trl_is_asked_for_by_its_interpreter_and_its_absence_said(
    smollm2_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gym(["data", "bench", str(smollm2_folder), "--trl", "/nowhere/python"]) == 2
    assert "no {% generation %} marks" in capsys.readouterr().err


def test_made_up_chats_are_the_same_each_time(tmp_path: Path) -> None:
    one, two = (write_chats(tmp_path / name, num_bytes=100_000).read_bytes() for name in ("a", "b"))
    assert one == two
    assert 100_000 <= len(one) < 110_000
