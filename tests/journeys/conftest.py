"""What journeys share: the daemon's test helpers made importable, the command, and one short real run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from journey import Gym, Trained, run_gym

HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parents[1] / "packages"
for folder in (HERE, PACKAGES / "gym-serve/tests", PACKAGES / "gym-trainer/tests/experience"):
    sys.path.insert(0, str(folder))


@pytest.fixture(scope="session")
def gym() -> Gym:
    return run_gym


@pytest.fixture(scope="session")
def trained(gym: Gym, tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path) -> Trained:
    """The quickstart, cut down to a few rows and steps."""
    runs = tmp_path_factory.mktemp("journey") / "runs"
    done = gym(
        "train",
        "examples/quickstart/run.yaml",
        "data.train[0].limit=12",
        "train.batch_size=4",
        "evaluation.tasks[0].num_rows=2",
        "evaluation.tasks[0].max_new_tokens=8",
        f"output.dir={runs}",
    )
    return Trained(Path(done.out.strip().splitlines()[-1]), done)
