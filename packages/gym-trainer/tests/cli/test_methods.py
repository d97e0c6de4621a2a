"""Guards every method as a user runs it: from its file through `gym train` to an artifact and a report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny_folder import note_rows, write_tiny_folder
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from gym_data import Tokenizer, prepare
from gym_sdk.cli._root import run as gym
from gym_sdk.events import MetricEvent, RunState, read_events
from gym_sdk.rundir import RunDir, find_runs
from gym_sdk.spec import load_spec

SPEC = """\
name: method
model: {source: ./tiny}
adapter: {rank: 4}
data: {train: [{source: rows.jsonl}], eval: {split: 0.25}, max_length: 256}
train: {batch_size: 4, epochs: 2, learning_rate: 1.0e-2}
output: {dir: runs}
"""


def chats(num_rows: int = 40) -> list[dict[str, Any]]:
    return note_rows(num_rows)


def pairs(num_rows: int = 40) -> list[dict[str, Any]]:
    """The record is preferred to the animal's name twice."""
    rows = []
    for number, row in enumerate(note_rows(num_rows)):
        note, record = (message["content"] for message in row["messages"])
        animal = json.loads(record)["species"]
        rows.append({"prompt": f"{note} ({number})", "chosen": record, "rejected": f"{animal} {animal}"})
    return rows


def labelled(num_rows: int = 40) -> list[dict[str, Any]]:
    rows = []
    for number, pair in enumerate(pairs(num_rows)):
        good = number % 2 == 0
        rows.append({"prompt": pair["prompt"], "completion": pair["chosen" if good else "rejected"], "label": good})
    return rows


def texts(num_rows: int = 40) -> list[dict[str, Any]]:
    return [{"text": row["messages"][0]["content"] + f" in year {i}"} for i, row in enumerate(note_rows(num_rows))]


def classes(num_rows: int = 40) -> list[dict[str, Any]]:
    return [{"prompt": pair["prompt"], "completion": json.loads(pair["chosen"])["species"]} for pair in pairs(num_rows)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_folder(folder / "tiny")
    write_tiny_folder(folder / "teacher", seed=1, hidden_size=48, intermediate_size=96)
    return folder


@pytest.fixture
def folder(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny").symlink_to(tiny / "tiny")
    (tmp_path / "teacher").symlink_to(tiny / "teacher")
    (tmp_path / "run.yaml").write_text(SPEC)
    monkeypatch.setenv("GYM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def only_run(folder: Path, where: str = "runs") -> RunDir:
    (path,) = find_runs(folder / where)
    return RunDir.open(path)


def metrics(run: RunDir, *, held_out: bool = False) -> list[dict[str, float]]:
    events = [dict(event.values) for event in read_events(run.events_path) if isinstance(event, MetricEvent)]
    return [values for values in events if ("eval_loss" in values) == held_out]


REWARDS = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}
METHODS = {
    "{kind: dpo}": (pairs, REWARDS | {"logps/chosen", "logps/rejected"}),
    "{kind: dpo, loss: ipo, extra_losses: [{name: sft, weight: 0.2}]}": (pairs, {"loss/ipo", "loss/sft"}),
    "{kind: dpo, reference: precomputed, length_alpha: 0.5}": (pairs, REWARDS),
    "{kind: orpo}": (pairs, REWARDS | {"nll_loss", "log_odds_ratio"}),
    "{kind: simpo}": (pairs, REWARDS),
    "{kind: cpo}": (pairs, REWARDS | {"nll_loss"}),
    "{kind: kto}": (labelled, {"rewards/chosen", "rewards/rejected", "rewards/margins", "kl"}),
    "{kind: pretrain}": (texts, {"token_accuracy"}),
    "{kind: sft, loss: dft, neftune_alpha: 5}": (chats, {"nll"}),
    "{kind: reward, centering: 0.01}": (pairs, REWARDS),
    "{kind: classification}": (classes, {"accuracy"}),
    "{kind: distillation, teacher: ./teacher, divergence: jsd}": (chats, {"divergence", "nll", "token_accuracy"}),
    "{kind: distillation, teacher: ./teacher, on_policy_share: 0.5, on_policy_max_tokens: 16}": (chats, {"divergence"}),
}


EVERY_TIME = {"{kind: dpo}", "{kind: classification}"}
"""Those with a way of their own through loading and export; the others in the slow job."""


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in EVERY_TIME else pytest.mark.slow) for name in METHODS]
)
def test_a_method_runs_from_its_file_to_its_artifact(folder: Path, method: str) -> None:
    rows, names = METHODS[method]
    write(folder, rows())
    assert gym(["train", "run.yaml", f"method={method}", "--quiet"]) == 0
    run = only_run(folder)
    assert run.state() is RunState.SUCCEEDED
    measured, held_out = metrics(run), metrics(run, held_out=True)
    assert len(measured) == 16
    for name in names:
        assert any(name in step and np.isfinite(step[name]) for step in measured), name
        assert np.isfinite(held_out[-1][f"eval_{name}"])
    weights = load_file(run.adapter_dir / "adapter_model.safetensors")
    assert any(float(value.abs().max()) > 0 for key, value in weights.items() if "lora_B" in key)
    scores = "reward" in method or "classification" in method
    assert any("score" in key for key in weights) == scores
    assert run.report_path("html").is_file()


@pytest.mark.parametrize("adapter", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_plain_transformers_gives_the_rewards_that_training_measured(folder: Path, adapter: str) -> None:
    write(folder, pairs())
    rate = "2e-3" if adapter == "full" else "1e-2"
    arguments = [f"adapter={{kind: {adapter}}}", f"train.learning_rate={rate}", "train.epochs=4"]
    assert gym(["train", "run.yaml", "method={kind: reward}", *arguments, "--quiet"]) == 0
    run = only_run(folder)
    artifact = run.adapter_dir if adapter == "lora" else run.model_dir
    tokenizer = AutoTokenizer.from_pretrained(artifact)
    scores = json.loads((artifact / "gym.json").read_text())["scores"]
    assert scores == {"labels": ["reward"], "pad_token_id": tokenizer.pad_token_id}
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    if adapter == "lora":
        base = AutoModelForSequenceClassification.from_pretrained(
            folder / "tiny", num_labels=1, pad_token_id=scores["pad_token_id"]
        )
        model = PeftModel.from_pretrained(base, str(artifact)).eval()
    else:
        model = AutoModelForSequenceClassification.from_pretrained(artifact).eval()
        assert model.config.id2label == {0: "reward"}
    card = (artifact / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert f"num_labels=1, pad_token_id={scores['pad_token_id']}" in card or adapter == "full"
    total = {"chosen": 0.0, "rejected": 0.0}
    held_out = held_out_pairs(folder, run)
    with torch.no_grad():
        for pair in held_out:
            texts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair[side]}],
                    tokenize=False,
                )
                for side in ("chosen", "rejected")
            ]
            batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
            for side, value in zip(total, model(**inputs).logits[:, 0].tolist(), strict=True):
                total[side] += value / len(held_out)
    measured = metrics(run, held_out=True)[-1]
    assert measured["eval_rewards/accuracies"] >= 0.9
    assert total["chosen"] == pytest.approx(measured["eval_rewards/chosen"], rel=1e-4)
    assert total["rejected"] == pytest.approx(measured["eval_rewards/rejected"], rel=1e-4)


def held_out_pairs(folder: Path, run: RunDir) -> list[dict[str, Any]]:
    """The rows that the run held out: each prompt has a number of its own."""
    tiny, data = folder / "tiny", load_spec(run.spec_path).data
    store = prepare(data, tiny, cache_dir=folder / "cache", seed=0, objective="preference").eval
    assert store is not None
    tokenizer = Tokenizer.from_folder(tiny)
    texts = " ".join(tokenizer.decode(store.group(index)[0].ids.tolist()) for index in range(store.num_groups))
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    found = [row for row in rows if row["prompt"] in texts]
    assert len(found) == store.num_groups
    return found


@pytest.mark.slow
def test_dpo_starts_at_a_margin_of_zero_and_widens_it_on_held_out_pairs(folder: Path) -> None:
    write(folder, pairs())
    assert gym(["train", "run.yaml", "method={kind: dpo, beta: 0.5}", "train.epochs=4", "--quiet"]) == 0
    run = only_run(folder)
    first, last = metrics(run)[0], metrics(run, held_out=True)[-1]
    assert first["rewards/margins"] == 0
    assert first["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert last["eval_rewards/margins"] > 0.3
    assert last["eval_rewards/accuracies"] >= 0.9


def test_dpo_on_an_sft_adapter_is_held_to_the_sft_model_and_not_to_the_base(folder: Path) -> None:
    write(folder, chats())
    assert gym(["train", "run.yaml", "output.dir=sft", "train.max_steps=4", "--quiet"]) == 0
    sft = only_run(folder, "sft")
    write(folder, pairs())
    adapter = f"adapter={{kind: lora, init_from: {sft.adapter_dir}}}"
    for reference in ("auto", "precomputed"):
        method = f"method={{kind: dpo, reference: {reference}}}"
        arguments = ["train", "run.yaml", method, adapter, f"output.dir={reference}", "train.max_steps=3", "--quiet"]
        assert gym(arguments) == 0
    courses = [metrics(only_run(folder, reference)) for reference in ("auto", "precomputed")]
    for course in courses:
        assert course[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
        assert course[2]["rewards/margins"] == pytest.approx(courses[0][2]["rewards/margins"], rel=1e-3)
    assert courses[0][2]["rewards/margins"] != 0
    assert len(np.load(only_run(folder, "precomputed").data_dir / "reference-train.npy")) == 60


@pytest.mark.parametrize(
    ("method", "rows", "message"),
    [
        ("{kind: dpo}", chats, "rows.jsonl:1: the method needs pairs of chosen and rejected answers, but this row is"),
        ("{kind: sft}", pairs, "rows.jsonl:1: the method needs chats or text, but this row is preference"),
        ("{kind: kto}", chats, "rows.jsonl:1: the method needs answers with a label, good or bad"),
        ("{kind: kto}", lambda: labelled()[::2], "labels are true: KTO learns from good and bad answers"),
        ("{kind: reward}", labelled, "rows.jsonl:1: the method needs pairs of chosen and rejected answers"),
        ("{kind: pretrain}", chats, "rows.jsonl: pretraining reads plain text, and these rows are openai"),
        ("{kind: classification}", chats, "are texts, not classes"),
        ("{kind: classification, labels: [lion, zebra]}", classes, "is none of the classes (lion, zebra)"),
        ("{kind: distillation, teacher: ./nowhere}", chats, "method.teacher: there is no"),
        ("{kind: distillation, teacher: ./other}", chats, "another vocabulary than the student: 2 tokens differ"),
    ],
)
def test_rows_and_teachers_that_do_not_fit_the_method_are_found_before_weights_load(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    method: str,
    rows: Any,
    message: str,
) -> None:
    write(folder, rows())
    other = folder / "other"
    shutil.copytree(folder / "teacher", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["content"] = "<|another|>"
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["<|another|>"] = vocabulary.pop("<|endoftext|>")
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr(
        "gym_serve.models.load_model", lambda *a, **k: pytest.fail("weights were loaded"), raising=False
    )
    assert gym(["train", "run.yaml", f"method={method}", "--quiet"]) == 2
    said = capsys.readouterr().err
    assert message in " ".join(said.split()), said
    assert said.count("error: ") == 1
    assert only_run(folder).state() is RunState.FAILED
