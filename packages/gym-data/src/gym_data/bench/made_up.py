"""Chats for measuring, of any size, the same ones each time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

NUM_ROWS = 4000


def write_chats(path: Path, *, num_rows: int | None = None, num_bytes: int | None = None) -> Path:
    """JSON Lines of chats of one to three turns over a vocabulary of made-up words, about 200 tokens each.

    So many rows, or rows until the file has so many bytes.
    """
    random = np.random.default_rng(0)
    letters = np.array(list("aeioubcdfghjklmnprstvw"))
    words = ["".join(random.choice(letters, random.integers(2, 9))) for _ in range(3000)]

    def text(mean: int) -> str:
        drawn = random.zipf(1.3, max(1, random.poisson(mean))) % len(words)
        return " ".join(words[int(index)] for index in drawn) + "."

    written = rows = 0
    wanted_rows = (NUM_ROWS if num_rows is None else num_rows) if num_bytes is None else None
    with path.open("w", encoding="utf-8") as file:
        while rows < wanted_rows if wanted_rows is not None else written < (num_bytes or 0):
            messages = []
            for _ in range(int(random.integers(1, 4))):
                messages += [{"role": "user", "content": text(20)}, {"role": "assistant", "content": text(30)}]
            written += file.write(json.dumps({"messages": messages}) + "\n")
            rows += 1
    return path
