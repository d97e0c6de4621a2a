"""Guards agreement with TRL on the same models and rows: loss, gradient, metrics (recorded by record_trl.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from known import OtherModel, build_preference, fingerprint, known_model, label_store, measure, pair_store

from gym_sdk.spec import Cpo, Dpo, Kto, Orpo, Simpo, WeightedLoss
from gym_trainer.loop.batch import StoreRows
from gym_trainer.objectives.kto import MismatchedRows

TRL = json.loads(Path(__file__).with_name("trl.json").read_text())
RTOL = 2e-6
"""TRL computes in float32 here and there, and so does Gym."""

DPO = {
    "sigmoid": Dpo(beta=0.3),
    "hinge": Dpo(beta=0.3, loss="hinge"),
    "ipo": Dpo(beta=0.3, loss="ipo"),
    "robust": Dpo(beta=0.3, loss="robust", label_smoothing=0.2),
    "apo_zero": Dpo(beta=0.3, loss="apo_zero"),
    "apo_down": Dpo(beta=0.3, loss="apo_down"),
    "sigmoid, length_alpha": Dpo(beta=0.3, length_alpha=0.4),
}
REFERENCE_FREE = {
    "orpo": Orpo(odds_ratio_weight=0.3),
    "simpo": Simpo(beta=0.3, gamma=0.7),
    "sigmoid": Cpo(beta=0.3, sft_weight=0.0),
    "hinge": Cpo(beta=0.3, loss="hinge", sft_weight=0.0),
    "ipo": Cpo(beta=0.3, loss="ipo", sft_weight=0.0),
}


def same(result: Any, model: torch.nn.Module, recorded: dict[str, Any]) -> None:
    assert result.loss == pytest.approx(recorded["loss"], rel=RTOL)
    assert fingerprint(model) == pytest.approx(recorded["gradient"], rel=1e-5)
    got = {name: total / count for name, (total, count) in result.metrics.items() if count}
    for name in recorded.get("metrics", {}).keys() & got.keys():
        assert got[name] == pytest.approx(recorded["metrics"][name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("name", DPO)
def test_dpo(name: str) -> None:
    policy = known_model(1.0)
    result = measure(
        build_preference(DPO[name], OtherModel(known_model(2.0))), policy, StoreRows(pair_store()), tokens=50
    )
    same(result, policy, TRL["dpo"][name])
    shared = result.metrics.keys() & TRL["dpo"][name]["metrics"].keys()
    assert {"rewards/chosen", "rewards/margins", "rewards/accuracies", "logps/rejected"} <= shared


def test_the_sft_term_of_a_sum_of_losses() -> None:
    method = Dpo(beta=0.3, loss_weight=0.5, extra_losses=[WeightedLoss(name="sft", weight=2.0)])
    result = measure(build_preference(method, OtherModel(known_model(2.0))), known_model(1.0), StoreRows(pair_store()))
    parts = {name: total / count for name, (total, count) in result.metrics.items() if name.startswith("loss/")}
    expected = {name: TRL["dpo"][name]["loss"] for name in ("sigmoid", "sft")}
    assert parts == {f"loss/{name}": pytest.approx(value, rel=RTOL) for name, value in expected.items()}
    assert result.loss == pytest.approx(0.5 * expected["sigmoid"] + 2 * expected["sft"], rel=RTOL)


@pytest.mark.parametrize(("name", "keys"), [("kl above 0", (2.0, 1.0)), ("kl at 0", (1.0, 2.0))])
def test_kto(name: str, keys: tuple[float, float]) -> None:
    policy, reference = (known_model(key) for key in keys)
    method = Kto(beta=0.3, desirable_weight=1.2, undesirable_weight=0.7)
    rows = MismatchedRows(label_store(), seed=0)  # type: ignore[arg-type]
    result = measure(build_preference(method, OtherModel(reference)), policy, rows, tokens=50)
    same(result, policy, TRL["kto"][name])
    assert (result.metrics["kl"][0] > 0) == (name == "kl above 0")


@pytest.mark.parametrize("name", REFERENCE_FREE)
def test_methods_without_a_reference(name: str) -> None:
    policy = known_model(1.0)
    objective = build_preference(REFERENCE_FREE[name], OtherModel(policy))
    same(measure(objective, policy, StoreRows(pair_store())), policy, TRL["reference_free"][name])
