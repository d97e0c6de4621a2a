"""Makes the daemon's test helpers importable: its process, its stand-in engine and trainer."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parents[1] / "packages/gym-serve/tests"):
    sys.path.insert(0, str(folder))
