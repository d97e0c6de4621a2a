"""Guards optimizers, schedules, early stopping and the mirror: exact on resume, and said when something is missing."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import final_weights, fit_tiny, logs, losses, tiny_spec
from tiny_rows import tiny_model, tiny_store

from gym_sdk.errors import SpecError, UserError
from gym_sdk.events import MetricEvent, read_events
from gym_sdk.spec import spec_from_data
from gym_trainer.loop import checkpoint, optimizers
from gym_trainer.loop.batch import StoreRows
from gym_trainer.loop.mirror import open_mirror
from gym_trainer.loop.muon import MuonAndAdamW
from gym_trainer.loop.optimizers import require_optimizer

SHORT = {"epochs": 1, "checkpoint_every_steps": 3}
INSTALLED = ["adamw_8bit", "paged_adamw_8bit", "adafactor", "muon", "sgd", "schedule_free_adamw"]


def learning_rates(run_path: Path) -> list[float]:
    found = [e for e in read_events(run_path / "events.jsonl") if isinstance(e, MetricEvent)]
    return [event.values["learning_rate"] for event in found if "learning_rate" in event.values]


@pytest.mark.parametrize("name", INSTALLED)
def test_each_optimizer_moves_the_weights_and_resumes_to_the_same_numbers(name: str, tmp_path: Path) -> None:
    schedule = {"schedule": "constant"} if name.startswith("schedule_free") else {}
    spec = tiny_spec(optimizer=name, **SHORT, **schedule)
    fit_tiny(tmp_path / "whole", spec)
    initial = fit_tiny(tmp_path / "half", spec)
    assert initial.num_steps == 6
    whole = final_weights(tmp_path / "whole")
    assert any(bool(value.any()) for key, value in whole.items() if "lora_B" in key)
    # as if it had been killed after step 3
    checkpoint.remove(tmp_path / "half" / "checkpoints" / "checkpoint-6")
    assert fit_tiny(tmp_path / "half", spec, resume=True).resumed_from == 3
    resumed = final_weights(tmp_path / "half")
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.parametrize("name", ["galore_adamw", "apollo_adamw"])
def test_projections_are_in_the_checkpoint_and_resume_goes_on_with_them(name: str, tmp_path: Path) -> None:
    package = name.replace("adamw", "torch")
    pytest.importorskip(package, reason=f"{package} is not installed")
    spec = tiny_spec(optimizer=name, adapter={"kind": "full"}, **SHORT)
    fit_tiny(tmp_path / "whole", spec)
    fit_tiny(tmp_path / "half", spec)
    checkpoint.remove(tmp_path / "half" / "checkpoints" / "checkpoint-6")
    assert fit_tiny(tmp_path / "half", spec, resume=True).resumed_from == 3
    whole, resumed = (final_weights(tmp_path / run) for run in ("whole", "half"))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_muon_takes_the_matrices_and_leaves_the_rest_to_adamw() -> None:
    model = tiny_model()
    from transformers import TrainingArguments

    build = optimizers.optimizer_builder(tiny_spec(optimizer="muon").train, tiny_spec(adapter={"kind": "full"}).adapter)
    assert build is not None
    built = build(model, TrainingArguments(output_dir="unused", learning_rate=1e-2, use_cpu=True))
    assert isinstance(built, MuonAndAdamW)
    muon, adamw = built._parts
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    taken = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    left = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert "model.layers.0.mlp.up_proj.weight" in taken
    assert left == {n for n in names.values() if "norm" in n or "embed" in n or "lm_head" in n}


def test_lora_plus_gives_b_its_own_rate(tmp_path: Path) -> None:
    spec = tiny_spec(adapter={"kind": "lora", "rank": 4, "lora_plus_factor": 8.0}, schedule="constant", **SHORT)
    fit_tiny(tmp_path / "run", spec)
    state = torch.load(tmp_path / "run" / "checkpoints" / "checkpoint-6" / "optimizer.pt", weights_only=True)
    rates = sorted({group["lr"] for group in state["param_groups"] if group["params"]})
    assert rates == pytest.approx([1e-2, 8e-2])


def test_wsd_rises_stays_and_falls(tmp_path: Path) -> None:
    spec = tiny_spec(schedule="wsd", decay_ratio=0.5, warmup_ratio=0.2, epochs=2, checkpoint_every_steps=12)
    fit_tiny(tmp_path / "run", spec)
    rates = learning_rates(tmp_path / "run")
    peak = 1e-2
    assert len(rates) == 12
    assert rates[0] < rates[1] < peak
    assert rates[3:6] == pytest.approx([peak] * 3)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[6:]))


def test_a_run_of_one_step_has_no_warm_up_in_which_nothing_moves(tmp_path: Path) -> None:
    fit_tiny(tmp_path / "run", tiny_spec(warmup_ratio=0.1, max_steps=1))
    assert learning_rates(tmp_path / "run") == [pytest.approx(1e-2)]


def test_an_optimizer_whose_package_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "galore_torch" else there(name))
    with pytest.raises(UserError, match="galore_adamw needs galore_torch") as error:
        require_optimizer("galore_adamw")
    assert error.value.hint == "pip install galore-torch"
    for name in INSTALLED:
        require_optimizer(name)


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"train": {"optimizer": "schedule_free_adamw"}}, "train.schedule"),
        ({"train": {"optimizer": "galore_adamw"}}, "train.optimizer"),
        ({"train": {"early_stopping_patience": 2}}, "train.early_stopping_patience"),
        ({"train": {"keep": "best"}}, "train.keep"),
        ({"adapter": {"kind": "lora", "experts": "adapt", "dora": True}}, "adapter.dora"),
        ({"adapter": {"kind": "lora", "init": "loftq"}}, "adapter.init"),
        ({"adapter": {"kind": "freeze"}, "model": {"source": "m", "quantization": "nf4"}}, "model.quantization"),
    ],
)
def test_settings_that_cannot_stand_together_are_found_before_anything_loads(values: Any, path: str) -> None:
    with pytest.raises(SpecError, match=path):
        spec_from_data({"model": {"source": "m"}, "data": {"train": [{"source": "d"}]}} | values)


def spec_with_evaluation(**train: Any) -> Any:
    values = {"epochs": 4, "batch_size": 8, "learning_rate": 5e-2, "schedule": "constant", "eval_every_steps": 2}
    return spec_from_data(
        {
            "model": {"source": "tiny"},
            "data": {"train": [{"source": "rows.jsonl"}], "eval": {"sources": [{"source": "eval.jsonl"}]}},
            "adapter": {"kind": "lora", "rank": 8},
            "train": values | {"checkpoint_every_steps": 2} | train,
        }
    )


def evaluation_losses(run_path: Path) -> dict[int, float]:
    found = (e for e in read_events(run_path / "events.jsonl") if isinstance(e, MetricEvent))
    return {event.step: event.values["eval_loss"] for event in found if "eval_loss" in event.values}


def test_early_stopping_ends_the_run_and_the_best_weights_are_the_result(tmp_path: Path) -> None:
    # Random rows: what is learned of some by heart makes others worse.
    spec = spec_with_evaluation(keep="best", early_stopping_patience=2, keep_checkpoints=1)
    held_out = StoreRows(tiny_store(16, seed=5))
    result = fit_tiny(tmp_path / "run", spec, eval_rows=held_out)
    by_step = evaluation_losses(tmp_path / "run")
    assert result.num_steps < result.max_steps
    assert not result.paused
    best_step = min((step for step in by_step if step <= result.num_steps), key=lambda step: by_step[step])
    assert best_step < result.num_steps
    kept = sorted(checkpoint.steps_on_disk(tmp_path / "run" / "checkpoints"))
    assert kept == [best_step, result.num_steps]
    # The last evaluation is of the weights that the run hands on.
    assert result.metrics["eval_loss"] == pytest.approx(min(by_step.values()), rel=1e-6)


def test_a_mirror_holds_what_the_run_holds_and_a_new_machine_goes_on_from_it(tmp_path: Path) -> None:
    spec = tiny_spec(**SHORT).model_copy(
        update={"output": tiny_spec().output.model_copy(update={"mirror": str(tmp_path / "drive")})}
    )
    fit_tiny(tmp_path / "run", spec)
    mirrored = tmp_path / "drive" / "run" / "checkpoints"
    assert sorted(checkpoint.steps_on_disk(mirrored)) == [3, 6]
    assert all(checkpoint.problem(path) is None for path in checkpoint.steps_on_disk(mirrored).values())
    expected = final_weights(tmp_path / "run")
    # The machine is gone after step 3, and so is its folder.
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(mirrored / "checkpoint-6")
    resumed = fit_tiny(tmp_path / "run", spec, resume=True)
    assert resumed.resumed_from == 3
    assert "checkpoint-3 was fetched from output.mirror" in logs(tmp_path / "run")
    assert sorted(losses(tmp_path / "run")) == [4, 5, 6]
    assert all(torch.equal(expected[key], value) for key, value in final_weights(tmp_path / "run").items())


def test_a_copy_without_its_manifest_or_with_a_cut_file_is_never_used(tmp_path: Path) -> None:
    spec = tiny_spec(**SHORT)
    fit_tiny(tmp_path / "run", spec)
    checkpoints = tmp_path / "run" / "checkpoints"
    mirror = open_mirror(str(tmp_path / "drive"), "run")
    for path in checkpoint.steps_on_disk(checkpoints).values():
        mirror.push_checkpoint(path)
    copies = tmp_path / "drive" / "run" / "checkpoints"
    (copies / "checkpoint-6" / "optimizer.pt").write_bytes(b"cut")
    (tmp_path / "new").mkdir()
    pulled = mirror.pull_newer(tmp_path / "new")
    assert pulled is not None
    assert pulled.name == "checkpoint-3"
    (copies / "checkpoint-3" / "manifest.json").unlink()
    shutil.rmtree(tmp_path / "new")
    (tmp_path / "new").mkdir()
    assert mirror.pull_newer(tmp_path / "new") is None
    assert list((tmp_path / "new").iterdir()) == []


def test_a_mirror_in_memory_serves_like_a_folder(tmp_path: Path) -> None:
    """Any file system of fsspec: this one stands for s3 and its like."""
    spec = tiny_spec(**SHORT)
    fit_tiny(tmp_path / "run", spec)
    (tmp_path / "run" / "run.json").write_text(json.dumps({"name": "run"}))
    mirror = open_mirror("memory://bucket/runs", "run")
    newest, _ = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    mirror.push_checkpoint(newest)
    mirror.push_run(tmp_path / "run")
    again = open_mirror("memory://bucket/runs/run")
    (tmp_path / "new").mkdir()
    again.pull_run(tmp_path / "new")
    assert (tmp_path / "new" / "events.jsonl").read_bytes() == (tmp_path / "run" / "events.jsonl").read_bytes()
    pulled = again.pull_newer(tmp_path / "new" / "checkpoints")
    assert pulled is not None
    assert checkpoint.problem(pulled) is None
    of_a_hub = open_mirror("hf://datasets/owner/runs", "run")
    assert type(of_a_hub._fs).__name__ == "HfFileSystem"  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(UserError, match="cannot be used"):
        open_mirror("no-such-scheme://bucket/runs")
