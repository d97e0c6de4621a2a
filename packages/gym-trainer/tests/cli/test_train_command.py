"""Guards the commands as a user types them: a run from its file to its report, killed and resumed, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_folder import note_rows, write_rows

from gym_sdk.cli._root import run as gym
from gym_sdk.events import RunState
from gym_sdk.rundir import RunDir, find_runs

SPEC = """\
name: notes
model: {source: ./tiny}
adapter: {rank: 4, dropout: 0.1}
data: {train: [{source: rows.jsonl}], max_length: 256}
train: {batch_size: 4, learning_rate: 1.0e-2, checkpoint_every_steps: 1, keep_checkpoints: 3}
evaluation:
  tasks: [{kind: json_fields, data: {source: held_out.jsonl}, num_rows: 2, max_new_tokens: 8}]
output: {dir: runs}
"""
ROWS = {"rows.jsonl": 40, "held_out.jsonl": 4}


def only_run(folder: Path) -> RunDir:
    (path,) = find_runs(folder / "runs")
    return RunDir.open(path)


def test_a_run_from_its_file_to_its_report_then_merged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gym(["train", "run.yaml", "train.learning_rate=2e-2"]) == 0
    said = capsys.readouterr()
    run = only_run(folder)
    assert said.out.splitlines() == [f"runs/{run.path.name}"]
    assert run.state() is RunState.SUCCEEDED
    assert "⟦" in said.err
    assert "micro-batch" in said.err
    report = json.loads(run.report_path("json").read_text())
    assert report["spec"]["train"]["learning_rate"] == 2e-2
    assert report["data"]["rows_train"] == 40
    assert report["training"]["num_steps"] == 10
    assert report["training"]["last_loss"] < report["training"]["first_loss"]
    assert report["evaluation"][0]["before"]["num_rows"] == report["evaluation"][0]["after"]["num_rows"] == 2
    assert json.loads(run.plan_path.read_text())["measured"]["peak_memory_bytes"] > 0
    assert (run.adapter_dir / "README.md").read_text().startswith("---\nlibrary_name: peft")

    assert gym(["export", str(run.path), "--merge", "out"]) == 0
    assert capsys.readouterr().out == "out\n"
    assert "lora" not in " ".join(load_file(folder / "out" / "model.safetensors"))
    assert gym(["export", str(run.path), "--merge", "out"]) == 2
    assert "is in use" in capsys.readouterr().err
    assert gym(["export", str(run.path), "--gguf", "notes.gguf", "--quant", "f16"]) == 0
    assert capsys.readouterr().out == "notes.gguf\n"
    assert (folder / "notes.gguf").read_bytes()[:4] == b"GGUF"
    assert 'PARAMETER stop "<|im_end|>"' in (folder / "notes.Modelfile").read_text()
    assert (folder / "notes.md").read_text().startswith("---\nlibrary_name: gguf")
    assert gym(["export", str(run.path)]) == 2
    assert "name what to write" in capsys.readouterr().err
    assert gym(["eval", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["num_rows"] == 2
    assert gym(["train", "--resume", str(run.path)]) == 2
    assert "nothing left to do" in capsys.readouterr().err


def test_killed_and_resumed_by_command_the_adapter_is_the_uninterrupted_one(
    folder: Path, train_and_kill: Callable[..., Path]
) -> None:
    killed = train_and_kill("run.yaml", "performance.num_threads=1")
    assert RunDir.open(killed).state() is RunState.TRAINING
    assert not (killed / "adapter").exists()
    assert not (killed / "report.html").exists()

    assert gym(["train", "--resume", str(killed), "--quiet"]) == 0
    assert RunDir.open(killed).state() is RunState.SUCCEEDED
    assert gym(["train", "run.yaml", "performance.num_threads=1", "--quiet"]) == 0
    resumed, expected = (
        load_file(path / "adapter" / "adapter_model.safetensors") for path in (killed, only_run(folder).path)
    )
    assert resumed.keys() == expected.keys()
    assert all(resumed[name].equal(expected[name]) for name in resumed)


def test_a_resumed_run_refuses_data_that_has_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gym(["train", "run.yaml", "train.learning_rate=1e30", "adapter={kind: full}", "--quiet"]) == 1
    run = only_run(folder)
    assert run.state() is RunState.FAILED
    assert "the last good checkpoint" in capsys.readouterr().err
    assert not run.model_dir.exists()
    write_rows(folder / "rows.jsonl", 30)
    assert gym(["train", "--resume", str(run.path)]) == 2
    assert "not what this run began with" in capsys.readouterr().err


BROKEN_ROW = json.dumps(note_rows(1)[0]) + "\n" + '{"messages": [{"role": "us'


@pytest.mark.parametrize(
    ("arguments", "files", "message"),
    [
        (["train.lerning_rate=1"], {}, r"learning_rate"),
        (["train.batch_size=many"], {}, r"train.batch_size"),
        (["data.train[0].source=row.jsonl"], {}, r"Did you mean .*rows.jsonl"),
        ([], {"rows.jsonl": BROKEN_ROW}, r"rows.jsonl:2"),
        ([], {"rows.jsonl": '{"what": "is this"}\n'}, r"rows.jsonl"),
        ([], {"held_out.jsonl": '{"messages":[{"role":"user","content":"q"}]}\n'}, r"held_out.jsonl"),
        (["model.source=./nowhere"], {}, r"nowhere"),
        (["performance.memory_limit_gb=0.1"], {}, r"needs .* GiB"),
        (["adapter.rank=33"], {}, r"adapter.rank is 33"),
        (["adapter.targets=[q_prj]"], {}, r"q_prj"),
        (["data.max_length=8"], {}, r"no training row is left|max_length"),
        (["output.dir=rows.jsonl"], {}, r"is a file"),
        (["output.report_to=[tensorbord]"], {}, r"tensorbord"),
    ],
)
def test_bad_input_is_one_message_with_a_way_out_and_no_run_that_looks_complete(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], files: dict[str, str], message: str
) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)
    assert gym(["train", "run.yaml", "--quiet", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    assert said.err.count("error: ") == 1
    import re

    assert re.search(message, said.err), said.err
    for path in find_runs(folder / "runs"):
        run = RunDir.open(path)
        assert run.state() is RunState.FAILED
        assert not run.adapter_dir.exists()
        assert not run.report_path("html").exists()


def test_the_doctor_says_what_is_missing_and_no_value_of_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert gym(["doctor", "--report"]) == 0
    said = capsys.readouterr().out
    assert "HF_TOKEN" in said
    assert "hf_secret" not in said
    assert str(Path.home()) not in said
    assert gym(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    torch = next(item for item in found["packages"] if item["name"] == "torch")
    assert torch["state"] == "ok"
