"""Guards the data benchmark: its figures are there and belong together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gym_data.bench import bench


def test_the_benchmark_measures_every_stage(smollm2_folder: Path, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "Two."}]}
    file = tmp_path / "chats.jsonl"
    file.write_text((json.dumps(row) + "\n") * 200)
    found = bench(smollm2_folder, file, repetitions=1)
    assert found.rows == 200
    assert found.quick_share == 1.0
    rates = [value for name, value in found.to_data().items() if name.endswith("_tokens_per_s")]
    assert len(rates) == 6
    assert all(rate > 0 for rate in rates)
    assert found.end_to_end_share_of_raw == pytest.approx(
        found.end_to_end_tokens_per_s / found.raw_tokenizer_tokens_per_s
    )
