"""Guards memory: a file of 5 GB is prepared by processes that together never hold more than 1 GiB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FILE_BYTES = 5_000_000_000
LIMIT_BYTES = 1 << 30
NUM_WORKERS = 2

PREPARE = """
import json, resource, sys
from gym_data import prepare
from gym_sdk.spec.data import DataSource, DataSpec

data = DataSpec(train=[DataSource(source=sys.argv[1])], num_workers=int(sys.argv[4]))
report = prepare(data, sys.argv[2], cache_dir=sys.argv[3], seed=0).report
# ru_maxrss is in KiB, and of the children that of the largest one.
peaks = [resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps({"rows": report.rows_train, "tokens": report.tokens, "own_bytes": peaks[0], "worker_bytes": peaks[1]}))
"""


def write_long_words(path: Path, num_bytes: int, folder: Path) -> int:
    """Chats in lines of about 1 KB, of words that are one long token each and so quick to encode; their number."""
    random = np.random.default_rng(0)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(word[1:] for word in vocabulary if word[0] == "Ġ" and word[1:].isascii() and len(word) > 11)
    blocks = []
    for _ in range(50):
        rows = []
        for _ in range(1000):
            text = " ".join(words[index] for index in random.integers(0, len(words), 75))
            messages = [{"role": "user", "content": text[:300]}, {"role": "assistant", "content": text[300:]}]
            rows.append(json.dumps({"messages": messages}) + "\n")
        blocks.append("".join(rows))
    written = num_blocks = 0
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes:
            written += file.write(blocks[num_blocks % len(blocks)])
            num_blocks += 1
    return 1000 * num_blocks


def measured(path: Path, folder: Path, cache: Path) -> dict[str, int]:
    """The counts of a preparation in a process of its own, and the most memory that it and one worker held."""
    command = [sys.executable, "-c", PREPARE, str(path), str(folder), str(cache), str(NUM_WORKERS)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.study
@pytest.mark.timeout(3600)
def test_five_gigabytes_are_prepared_within_one_gibibyte(smollm2_folder: Path, tmp_path: Path) -> None:
    rows = write_long_words(tmp_path / "big.jsonl", FILE_BYTES, smollm2_folder)
    found = measured(tmp_path / "big.jsonl", smollm2_folder, tmp_path)
    assert found["rows"] == rows
    assert found["own_bytes"] + NUM_WORKERS * found["worker_bytes"] <= LIMIT_BYTES
