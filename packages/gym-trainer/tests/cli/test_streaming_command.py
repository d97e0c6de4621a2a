"""Guards training on rows that are read meanwhile: killed and resumed, the run is the uninterrupted one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gym_sdk.cli._root import run as gym
from gym_sdk.events import MetricEvent, RunState, read_events
from gym_sdk.rundir import RunDir, find_runs

SPEC = """\
name: notes
model: {source: ./tiny}
adapter: {rank: 4, dropout: 0.1}
data: {train: [{source: rows.jsonl, weight: 2}, {source: more.jsonl}], max_length: 256, streaming: true}
train: {batch_size: 4, max_steps: 14, learning_rate: 1.0e-2, checkpoint_every_steps: 1, keep_checkpoints: 3}
performance: {num_threads: 1}
output: {dir: runs}
"""
STREAMED = ["data.shuffle_buffer_rows=8"]
ROWS = {"rows.jsonl": 40, "more.jsonl": 15}


def losses(run: Path) -> dict[int, set[float]]:
    found: dict[int, set[float]] = {}
    for event in read_events(run / "events.jsonl"):
        if isinstance(event, MetricEvent) and "loss" in event.values:
            found.setdefault(event.step, set()).add(event.values["loss"])
    return found


def test_killed_and_resumed_a_streaming_run_ends_with_the_same_adapter(
    folder: Path, train_and_kill: Callable[..., Path]
) -> None:
    killed = train_and_kill("run.yaml", *STREAMED)
    assert all((path / "data" / "state.json").is_file() for path in (killed / "checkpoints").glob("checkpoint-*"))

    assert gym(["train", "--resume", str(killed), "--quiet"]) == 0
    assert RunDir.open(killed).state() is RunState.SUCCEEDED
    assert gym(["train", "run.yaml", *STREAMED, "--quiet"]) == 0
    (whole,) = find_runs(folder / "runs")
    assert losses(killed) == losses(whole)
    assert set(losses(whole)) == set(range(1, 15))
    resumed, expected = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (killed, whole))
    assert all(resumed[name].equal(expected[name]) for name in expected)
    reports = [json.loads((path / "data" / "report.json").read_text()) for path in (killed, whole)]
    assert reports[0] == reports[1]
    assert reports[0]["rows_in"] > 14 * 4


def test_a_stream_needs_an_end_and_evaluation_rows_of_their_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gym(["train", "run.yaml", "train.max_steps=null", "data.eval.split=0.1", "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "train.max_steps: data.streaming does not know how many rows there are" in said
    assert "data.eval.split: a share of rows that are not read yet cannot be held out" in said
    assert not find_runs(folder / "runs")


def test_wrapped_text_is_trained_in_steps_of_so_many_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = [{"text": f"{i} lions at the hill, all calm and feeding. " * (1 + i % 7)} for i in range(60)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in text))
    wrapped = ["data={train: [{source: text.jsonl}], packing_strategy: wrapped, max_length: 64}"]
    assert gym(["train", "run.yaml", *wrapped, "train.batch_tokens=200", "--quiet"]) == 2
    assert "train.batch_tokens: must be a multiple of data.max_length, 64" in capsys.readouterr().err
    for more in ([], ["data.streaming=true"]):
        assert gym(["train", "run.yaml", *wrapped, "train={batch_tokens: 256, max_steps: 3}", *more, "--quiet"]) == 0
        newest = find_runs(folder / "runs")[0]
        fit = json.loads((newest / "fit.json").read_text())
        assert fit["num_tokens"] == 3 * 256
