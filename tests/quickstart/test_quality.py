"""Guards the promise of the quickstart: from nothing to nearly every field right, on notes that it never trained on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_ROWS = 240
VALID_JSON_BAR = 0.97
FIELD_ACCURACY_BAR = 0.85


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path) -> dict[str, dict[str, Any]]:
    """The quickstart as it stands, asked every held-out note: what the base model and the tuned one answered."""
    runs = tmp_path_factory.mktemp("quality") / "runs"
    command = [
        str(Path(sys.executable).with_name("gym")),
        "train",
        "examples/quickstart/run.yaml",
        f"evaluation.tasks[0].num_rows={NUM_ROWS}",
        f"output.dir={runs}",
    ]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    (folder,) = runs.iterdir()
    moments: dict[str, dict[str, Any]] = {}
    for moment in ("before", "after"):
        (moments[moment],) = json.loads((folder / "evaluation" / f"{moment}.json").read_text(encoding="utf-8"))
    return moments


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_tuned_model_passes_the_bars_and_the_base_model_is_nowhere_near(results: dict[str, dict[str, Any]]) -> None:
    before, after = results["before"], results["after"]
    assert before["num_rows"] == after["num_rows"] == NUM_ROWS
    said = {name: (before[name]["value"], after[name]["value"]) for name in ("valid", "field_accuracy", "exact")}
    assert after["valid"]["value"] >= VALID_JSON_BAR, said
    assert after["field_accuracy"]["value"] >= FIELD_ACCURACY_BAR, said
    assert before["field_accuracy"]["high"] < 0.1, said
    assert after["field_accuracy"]["low"] > before["field_accuracy"]["high"], said


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_field_is_left_behind(results: dict[str, dict[str, Any]]) -> None:
    by_field = {name: share["value"] for name, share in results["after"]["by_field"].items()}
    assert set(by_field) == {"species", "count", "activity", "place", "time", "threat"}
    assert min(by_field.values()) >= 0.6, by_field
