"""Guards the commands as a user types them: a run from its file to its report, killed and resumed, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_folder import note_rows, write_rows

from gym_sdk.cli._root import run as gym
from gym_sdk.events import MetricEvent, RunState, read_events
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
    assert gym(["train", "run.yaml", "train.learning_rate=2e-2", "--price", "$3600/h"]) == 0
    said = capsys.readouterr()
    run = only_run(folder)
    assert said.out.splitlines() == [f"runs/{run.path.name}"]
    assert run.state() is RunState.SUCCEEDED
    assert "⟦" in said.err
    assert "micro-batch" in said.err
    report = json.loads(run.report_path("json").read_text())
    assert report["spec"]["train"]["learning_rate"] == 2e-2
    assert report["spec"]["output"]["price_per_hour"] == 3600
    metrics = [event.values for event in read_events(run.events_path) if isinstance(event, MetricEvent)]
    costs = [values["cost"] for values in metrics if "cost" in values]
    assert len(costs) == 10
    assert 0 < costs[0] < costs[-1] < report["cost"]
    assert "at 3600 an hour" in (run.adapter_dir / "README.md").read_text()
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
    assert "name one thing to make of the run" in capsys.readouterr().err
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


def write_adapter(folder: Path, *, hidden_size: int) -> None:
    """An adapter of rank 2 for a model of this width."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(hidden_size=hidden_size, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(config)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(folder)


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
        (["method={kind: dpo}"], {}, r"rows.jsonl:1: the method needs .*pair"),
        (["method={kind: reward}", "evaluation.tasks=[]"], {}, r"rows.jsonl:1: the method needs .*pair"),
        (["method={kind: kto}"], {}, r"rows.jsonl:1: the method needs"),
        (["method={kind: pretrain}"], {}, r"plain text"),
        (["method={kind: classification}", "evaluation.tasks=[]"], {}, r"are texts, not classes"),
        (
            ["method={kind: classification, labels: [lion, kudu]}", "evaluation.tasks=[]"],
            {},
            r"rows.jsonl:\d+: the answer .* is none of the classes",
        ),
        (["method={kind: dpo, reference: adapter_disabled}", "adapter={kind: full}"], {}, r"method.reference"),
        (["method={kind: distillation, teacher: ./nowhere}"], {}, r"method.teacher.*nowhere"),
        (["adapter.targets=.*nothing"], {}, r"no linear layer's full name matches \.\*nothing"),
        (["adapter={kind: oft, block_size: 7}"], {}, r"block_size is 7.*does not divide|block_size"),
        (["adapter={kind: freeze, num_layers: 3}"], {}, r"num_layers is 3, but the model has 2"),
        (["adapter.modules_to_save=[nrm]"], {}, r"modules_to_save: nrm matches no module"),
        (["adapter.init_from=./tiny"], {}, r"has no adapter_config.json"),
        (["adapter.init_from=./other"], {}, r"does not fit this model.*24 inputs.*has 32"),
        (["adapter.init_from=./own", "adapter.rank=8"], {}, r"adapter.rank is 8, and the adapter in .* has 2"),
        (["adapter.init=loftq", "model.quantization=nf4"], {}, r"loftq, which computes on a CUDA device"),
        (["model.dtype=float16"], {}, r"does not compute in float16"),
    ],
)
def test_bad_input_is_one_message_with_a_way_out_and_no_run_that_looks_complete(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    files: dict[str, str],
    message: str,
) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)
    if any("other" in argument or "own" in argument for argument in arguments):
        write_adapter(folder / "own", hidden_size=32)
        write_adapter(folder / "other", hidden_size=24)

    def read(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("gym_serve.models.load_model", read)
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
