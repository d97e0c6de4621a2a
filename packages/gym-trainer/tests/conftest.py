"""Fixtures shared by the trainer's tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "loop")]

import torch

# Models of a few thousand weights lose by more threads, most of all where several suites share the cores.
torch.set_num_threads(1)
