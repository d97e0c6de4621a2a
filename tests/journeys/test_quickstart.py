"""Guards the way through the README: train, look, chat, export, plan, explain, and what each leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from journey import Gym, Trained

from gym_sdk.events import RunState
from gym_sdk.rundir import RunDir
from gym_sdk.spec import load_spec

QUICKSTART = "examples/quickstart/run.yaml"
NOTE = "its 1753h & honey badger x20 still in a fight nr kibo gate."


def test_training_prints_the_runs_folder_and_nothing_else_on_stdout(trained: Trained) -> None:
    assert trained.done.out.strip() == str(trained.folder)
    assert trained.folder.name.startswith("ranger-notes-")


def test_training_says_what_will_run_shows_rows_and_ends_with_before_and_after(trained: Trained) -> None:
    said = trained.done.err
    assert "micro-batch" in said
    assert "before" in said
    assert "after" in said
    assert "Patrol note to JSON" in said, "three rendered rows are shown before training"


def test_a_finished_run_holds_everything_that_the_design_names(trained: Trained) -> None:
    run = RunDir.open(trained.folder)
    assert run.state() is RunState.SUCCEEDED
    for name in ("spec.yaml", "plan.json", "events.jsonl", "report.json", "report.md", "report.html"):
        assert (trained.folder / name).stat().st_size > 0, name
    assert (trained.folder / "report.html").stat().st_size < 300_000
    assert (trained.folder / "adapter" / "adapter_model.safetensors").is_file()
    assert (trained.folder / "adapter" / "adapter_config.json").is_file()
    assert list((trained.folder / "checkpoints").glob("checkpoint-*"))


def test_the_saved_specification_is_resolved_and_runs_again(trained: Trained) -> None:
    spec = load_spec(trained.folder / "spec.yaml")
    assert spec.train.batch_size == 4
    assert spec.data.train[0].limit == 12
    assert Path(spec.data.train[0].source).is_absolute()


def test_the_report_compares_base_and_tuned_on_the_same_rows(trained: Trained) -> None:
    report = json.loads((trained.folder / "report.json").read_text(encoding="utf-8"))
    text = json.dumps(report)
    assert '"before"' in text
    assert '"after"' in text


def test_a_finished_run_is_not_resumed(gym: Gym, trained: Trained) -> None:
    done = gym("train", "--resume", trained.folder, code=2)
    assert "succeeded" in done.err
    assert "gym chat" in done.err


def test_the_result_answers_in_a_chat(gym: Gym, trained: Trained) -> None:
    done = gym("chat", trained.folder, NOTE, "--max-tokens", "8", "--temperature", "0")
    answer = done.out
    assert answer.strip()
    assert "with the system message of its training" in done.err
    assert "Patrol note to JSON" in done.err
    again = gym("chat", trained.folder, NOTE, "--max-tokens", "8", "--temperature", "0").out
    assert again == answer


def test_an_export_is_a_folder_that_plain_transformers_loads(gym: Gym, trained: Trained, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    done = gym("export", trained.folder, "--merge", out)
    assert done.out.strip() == str(out)

    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    base_folder = json.loads((trained.folder / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))[
        "base_model_name_or_path"
    ]
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode(NOTE)])
    with torch.no_grad():
        base_logits = base(ids).logits
        adapter_logits = PeftModel.from_pretrained(base, trained.folder / "adapter")(ids).logits
        merged_logits = merged(ids).logits
    assert not torch.allclose(base_logits, adapter_logits, atol=1e-3)
    torch.testing.assert_close(merged_logits, adapter_logits, atol=2e-3, rtol=1e-3)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(trained.folder / "adapter").chat_template


def test_an_export_never_overwrites(gym: Gym, trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("the only copy", encoding="utf-8")
    done = gym("export", trained.folder, "--merge", tmp_path, code=2)
    assert str(tmp_path) in done.err
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_plan_says_memory_and_time_before_anything_runs(gym: Gym) -> None:
    said = gym("plan", QUICKSTART).out
    assert "GiB" in said
    assert "tokens/s" in said
    assert "steps" in said


def test_help_comes_from_the_specification(gym: Gym) -> None:
    assert "default 16" in gym("explain", "adapter.rank").out
    schema = json.loads(gym("schema").out)
    assert schema["properties"]["train"]


def test_doctor_says_what_this_machine_is_fit_to_paste(gym: Gym) -> None:
    said = gym("doctor", "--report").out
    assert "torch" in said
    assert "gym-trainer" in said
    assert str(Path.home()) not in said
