"""Makes the helpers beside the tests importable, and keeps tiny models on one thread."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent / name) for name in (".", "loop", "exporting", "objectives")]

# Models of a few thousand weights lose by more threads, most of all where several suites share the cores.
torch.set_num_threads(1)
