"""Guards that trackers hear a run through transformers' own callbacks, and that their files lie in the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fitting import fit_tiny, tiny_spec
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from gym_sdk.errors import UserError
from gym_sdk.spec import RunSpec
from gym_trainer.loop.fit import check_trackers

MEASURES = {"learning_rate", "grad_norm", "token_accuracy", "throughput_tokens_per_s"}
TRACKERS = ["tensorboard", "wandb", "mlflow", "trackio"]


def spec_with(trackers: list[str]) -> RunSpec:
    spec = tiny_spec(max_steps=3)
    return spec.model_copy(update={"output": spec.output.model_copy(update={"report_to": trackers})})


def test_every_named_tracker_hears_every_step_and_its_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: dict[str, list[dict[str, float]]] = {name: [] for name in TRACKERS}
    names: set[str] = set()

    def stand_in(name: str) -> type[TrainerCallback]:
        class Tracker(TrainerCallback):
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                heard[name].append({"step": state.global_step, **logs})
                names.add(args.run_name)

        return Tracker

    for name in TRACKERS:
        monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, name, stand_in(name))
    fit_tiny(tmp_path / "tracked", spec_with(TRACKERS))
    for name in TRACKERS:
        steps = [logs for logs in heard[name] if "loss" in logs]
        assert [logs["step"] for logs in steps] == [1, 2, 3], name
        assert all(logs.keys() >= MEASURES for logs in steps)
    assert names == {"tracked"}


def test_tensorboards_files_lie_in_the_runs_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    fit_tiny(tmp_path / "tracked", spec_with(["tensorboard"]))
    assert list((tmp_path / "tracked" / "trackers").rglob("events.out.tfevents.*"))


def test_a_tracker_that_is_unknown_or_not_installed_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.integrations.get_available_reporting_integrations", lambda: ["mlflow"])
    check_trackers(["mlflow"])
    with pytest.raises(UserError, match=r"output\.report_to: wandb is not installed") as missing:
        check_trackers(["mlflow", "wandb"])
    assert missing.value.hint == "pip install wandb"
    with pytest.raises(UserError, match="no tracker wandbb"):
        check_trackers(["wandbb"])
