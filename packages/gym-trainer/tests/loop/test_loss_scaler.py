"""Guards float16's loss scaler, emulated on a processor: exact where nothing overflows; an overflow skips its step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import final_weights, fit_tiny, tiny_spec

from gym_trainer.loop import checkpoint
from gym_trainer.loop.trainer import GymTrainer

SHORT = {"epochs": 1, "checkpoint_every_steps": 3, "schedule": "constant"}
FIRST_SCALE = 1024.0


class Scaled:
    """Runs whose accelerator has torch's scaler in the places where it has one on a card in float16."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, overflow_in_step: int | None = None) -> None:
        self.scaler: Any = None
        original = GymTrainer.create_accelerator_and_postprocess

        def create(trainer: GymTrainer) -> None:
            original(trainer)
            accelerator: Any = trainer.accelerator
            self.scaler = accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, growth_interval=100)
            scale = self.scaler.scale

            def overflowing(loss: torch.Tensor) -> torch.Tensor:
                overflows = trainer.state.global_step + 1 == overflow_in_step
                return scale(loss) * (float("inf") if overflows else 1.0)

            self.scaler.scale = overflowing
            accelerator.unscale_gradients = lambda *_: [
                accelerator.scaler.unscale_(prepared.optimizer) for prepared in accelerator._optimizers
            ]

        monkeypatch.setattr(GymTrainer, "create_accelerator_and_postprocess", create)


def test_scaled_gradients_are_unscaled_before_they_are_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit_tiny(tmp_path / "plain", tiny_spec(**SHORT))
    scaled = Scaled(monkeypatch)
    fit_tiny(tmp_path / "scaled", tiny_spec(**SHORT))
    assert scaled.scaler.get_scale() == FIRST_SCALE
    plain, other = (final_weights(tmp_path / run) for run in ("plain", "scaled"))
    for key, value in plain.items():
        torch.testing.assert_close(other[key], value, rtol=1e-5, atol=1e-7)


def test_an_overflow_halves_the_scale_skips_the_step_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled = Scaled(monkeypatch, overflow_in_step=2)
    result = fit_tiny(tmp_path / "run", tiny_spec(**SHORT))
    assert result.num_steps == result.max_steps == 6
    assert scaled.scaler.get_scale() == FIRST_SCALE / 2
    weights = final_weights(tmp_path / "run")
    assert all(bool(value.isfinite().all()) for value in weights.values())
    assert any(bool(value.any()) for key, value in weights.items() if "lora_B" in key)


def test_a_resumed_run_goes_on_with_the_scale_that_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = Scaled(monkeypatch, overflow_in_step=2)
    spec = tiny_spec(**SHORT)
    fit_tiny(tmp_path / "whole", spec)
    fit_tiny(tmp_path / "half", spec)
    checkpoint.remove(tmp_path / "half" / "checkpoints" / "checkpoint-6")
    assert fit_tiny(tmp_path / "half", spec, resume=True).resumed_from == 3
    assert scaled.scaler.get_scale() == FIRST_SCALE / 2
    whole, resumed = (final_weights(tmp_path / run) for run in ("whole", "half"))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
