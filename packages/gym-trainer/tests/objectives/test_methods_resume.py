"""Guards that a preference run that was stopped goes on to the numbers of one that was not, whatever its reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import final_weights
from known import build_preference, label_store, pair_store
from tiny_rows import tiny_model

from gym_sdk.events import EventWriter, MetricEvent, read_events
from gym_sdk.spec import Dpo, Kto, spec_from_data
from gym_trainer.adapters import attach
from gym_trainer.fast import attention
from gym_trainer.loop.fit import FitResult, FitSettings, fit
from gym_trainer.loop.interrupt import StopRequest
from gym_trainer.objectives.reference import AdapterDisabled, FrozenCopy, Precomputed, Reference


class StopAfter(StopRequest):
    """Asks to stop once so many steps are logged."""

    def __init__(self, run_path: Path, step: int) -> None:
        super().__init__()
        self.run_path, self.step = run_path, step

    @property
    def requested(self) -> bool:
        events = read_events(self.run_path / "events.jsonl")
        return any(isinstance(event, MetricEvent) and event.step >= self.step for event in events)

    @requested.setter
    def requested(self, value: bool) -> None: ...


def fit_method(
    run_path: Path, kind: str, reference: Reference, *, resume: bool = False, stop: StopRequest | None = None
) -> FitResult:
    spec = spec_from_data(
        {
            "model": {"source": "tiny"},
            "data": {"train": [{"source": "rows.jsonl"}]},
            "adapter": {"rank": 4, "init": "pissa" if isinstance(reference, FrozenCopy) else "default"},
            "train": {"epochs": 3, "batch_size": 2, "learning_rate": 1e-2, "checkpoint_every_steps": 100},
        }
    )
    run_path.mkdir(exist_ok=True)
    (run_path / "checkpoints").mkdir(exist_ok=True)
    model = tiny_model()
    objective = build_preference(Dpo(beta=0.3) if kind == "dpo" else Kto(beta=0.3), reference)
    store: Any = pair_store() if kind == "dpo" else label_store(6)
    settings = FitSettings(
        device="cpu",
        dtype=torch.float32,
        attention=attention.choose(model.config, "cpu", torch.float32),
        packed=True,
        micro_batch_tokens=40,
    )
    with EventWriter(run_path / "events.jsonl") as events:
        return fit(
            attach(model, spec.adapter, seed=spec.seed).model,
            spec,
            settings,
            objective,
            train_rows=objective.rows(store),
            eval_rows=objective.rows(store),
            run_path=run_path,
            events=events,
            resume=resume,
            stop=stop,
        )


@pytest.mark.parametrize("reference", [AdapterDisabled, FrozenCopy, Precomputed])
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_stopped_run_goes_on_to_the_same_numbers(kind: str, reference: type[Reference], tmp_path: Path) -> None:
    whole = fit_method(tmp_path / "whole", kind, reference())
    stopped = tmp_path / "stopped"
    assert fit_method(stopped, kind, reference(), stop=StopAfter(stopped, 4)).paused
    resumed = fit_method(stopped, kind, reference(), resume=True)
    assert resumed.resumed_from in (4, 5)
    assert resumed.num_steps == whole.num_steps == 9
    assert resumed.metrics == whole.metrics
    assert "eval_rewards/margins" in whole.metrics
    assert whole.metrics["eval_rewards/margins"] != 0
    expected = final_weights(tmp_path / "whole")
    got = final_weights(stopped)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
