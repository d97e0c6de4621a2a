"""Guards: weights that move within the backward pass, or with states in host memory, end where they would otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import final_weights, fit_tiny, logs, losses, tiny_spec
from tiny_rows import tiny_model

from gym_sdk.errors import RunFailed, SpecError
from gym_sdk.events import MetricEvent, read_events
from gym_trainer.loop import checkpoint, host_states
from gym_trainer.loop.host_states import HostStates
from gym_trainer.loop.one_weight import GradientNorm, OneWeightOptimizer, stepping_in_backward

FULL = {"adapter": {"kind": "full"}, "max_grad_norm": None, "learning_rate": 1e-3, "max_steps": 4}
IN_BACKWARD = ["adamw", "adamw_8bit", "adafactor", "muon", "lion_8bit", "sgd"]
OFFLOADED = [("adamw", True), ("adamw_8bit", True), ("adafactor", False), ("ademamix_8bit", False)]
ONE_MICRO_BATCH = {"micro_batch_tokens": 100_000}


@pytest.fixture(autouse=True)
def _small_states_move_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_states, "FEWEST_NUMBERS", 1)


def norms(run_path: Path) -> list[float]:
    found = [event.values for event in read_events(run_path / "events.jsonl") if isinstance(event, MetricEvent)]
    return [values["grad_norm"] for values in found if "grad_norm" in values]


def assert_same_run(first: Path, second: Path) -> None:
    expected, found = final_weights(first), final_weights(second)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert losses(first) == losses(second)
    assert norms(second) == pytest.approx(norms(first), rel=1e-5)
    assert min(norms(second)) > 0


@pytest.mark.parametrize("name", IN_BACKWARD)
def test_weights_that_move_in_the_backward_pass_are_bit_for_bit_those_of_the_plain_step(
    name: str, tmp_path: Path
) -> None:
    spec = tiny_spec(optimizer=name, **FULL)
    fit_tiny(tmp_path / "plain", spec, settings=ONE_MICRO_BATCH)
    fit_tiny(tmp_path / "fused", spec, settings=ONE_MICRO_BATCH | {"optimizer_in_backward": True})
    assert_same_run(tmp_path / "plain", tmp_path / "fused")


@pytest.mark.parametrize(("name", "in_backward"), OFFLOADED)
def test_states_in_host_memory_change_nothing_and_resume(name: str, in_backward: bool, tmp_path: Path) -> None:
    spec = tiny_spec(optimizer=name, **FULL)
    offloaded = ONE_MICRO_BATCH | {"optimizer_in_backward": in_backward, "offload_optimizer": True}
    fit_tiny(tmp_path / "plain", spec, settings=ONE_MICRO_BATCH)
    fit_tiny(tmp_path / "offloaded", spec, settings=offloaded)
    assert_same_run(tmp_path / "plain", tmp_path / "offloaded")
    checkpoint.remove(tmp_path / "offloaded" / "checkpoints" / "checkpoint-4")
    assert fit_tiny(tmp_path / "offloaded", spec, settings=offloaded, resume=True).resumed_from == 2
    whole, resumed = final_weights(tmp_path / "plain"), final_weights(tmp_path / "offloaded")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_clipping_and_accumulation_work_with_states_in_host_memory(tmp_path: Path) -> None:
    spec = tiny_spec(**FULL | {"max_grad_norm": 0.1})
    fit_tiny(tmp_path / "plain", spec)
    fit_tiny(tmp_path / "offloaded", spec, settings={"offload_optimizer": True})
    assert_same_run(tmp_path / "plain", tmp_path / "offloaded")


def test_no_two_gradients_are_there_at_once_and_a_tied_weight_moves_once() -> None:
    model = tiny_model()
    model.lm_head.weight = model.model.embed_tokens.weight
    optimizer = OneWeightOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    most, moved = 0, []

    class Watched(OneWeightOptimizer):
        def step_weight(self, weight: Any) -> None:
            nonlocal most
            most = max(most, sum(p.grad is not None for p in model.parameters()))
            moved.append(id(weight))
            super().step_weight(weight)

    watched = Watched(optimizer.inner)
    with stepping_in_backward(watched, GradientNorm()):
        model(input_ids=torch.arange(12)[None], labels=torch.arange(12)[None]).loss.backward()
    assert most == 1
    assert sorted(moved) == sorted(id(p) for p in model.parameters())


def test_states_are_in_host_memory_between_steps() -> None:
    weight = torch.nn.Parameter(torch.randn(64, 64))
    optimizer = OneWeightOptimizer(torch.optim.AdamW([weight]), HostStates(torch.device("cpu")))
    seen = []
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        seen.append(optimizer.state[weight]["exp_avg"].data_ptr())
    assert len(set(seen)) == 1
    assert seen[0] == optimizer.states._host[weight]["exp_avg"].data_ptr()


def test_a_loss_that_is_not_finite_moves_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gym_trainer.objectives.sft import SftObjective

    own = SftObjective.loss
    monkeypatch.setattr(SftObjective, "loss", lambda *args: _spoilt(own(*args)))
    moved: list[Any] = []
    monkeypatch.setattr(OneWeightOptimizer, "step_weight", lambda self, weight: moved.append(weight))
    settings = ONE_MICRO_BATCH | {"optimizer_in_backward": True}
    with pytest.raises(RunFailed, match="the loss is nan at step 1"):
        fit_tiny(tmp_path / "run", tiny_spec(**FULL), settings=settings)
    assert not moved


def _spoilt(result: Any) -> Any:
    import dataclasses

    return dataclasses.replace(result, loss=result.loss * float("nan"))


def test_an_out_of_memory_is_not_tried_again_when_weights_may_have_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(OneWeightOptimizer, "step_weight", full)
    settings = ONE_MICRO_BATCH | {"optimizer_in_backward": True}
    with pytest.raises(RunFailed, match="whose weights move in its backward pass"):
        fit_tiny(tmp_path / "run", tiny_spec(**FULL), settings=settings)
    assert not [text for text in logs(tmp_path / "run") if "micro-batches of" in text]


@pytest.mark.parametrize(
    ("train", "performance", "reason"),
    [
        ({}, {"optimizer_in_backward": "on"}, "clipping needs every gradient"),
        ({"max_grad_norm": None, "micro_batch_tokens": 64}, {"optimizer_in_backward": "on"}, "several micro-batches"),
        (
            {"max_grad_norm": None, "adapter": {"kind": "lora"}},
            {"optimizer_in_backward": "on"},
            "there is nothing to save",
        ),
        ({"optimizer": "muon"}, {"offload_optimizer": "on"}, "is two optimizers"),
        ({"optimizer": "paged_adamw_8bit"}, {"offload_optimizer": "on"}, "pages its states by itself"),
    ],
)
def test_a_setting_that_would_be_wrong_is_refused_with_the_reason(
    train: dict[str, Any], performance: dict[str, Any], reason: str
) -> None:
    from gym_sdk.spec import spec_from_data

    adapter = train.pop("adapter", {"kind": "full"})
    with pytest.raises(SpecError, match=reason):
        spec_from_data(
            {
                "model": {"source": "tiny"},
                "data": {"train": [{"source": "rows.jsonl"}]},
                "adapter": adapter,
                "train": train,
                "performance": performance,
            }
        )
