"""Train in a process of its own: `python train_script.py SPEC RUN_DIR`, to be killed by a test."""

from __future__ import annotations

import sys

from gym_sdk.rundir import RunDir
from gym_sdk.spec import load_spec
from gym_trainer.experience.run import train_experience

if __name__ == "__main__":
    train_experience(load_spec(sys.argv[1]), RunDir.open(sys.argv[2]))
