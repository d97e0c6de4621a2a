"""Guards: a peer is measured by its own interpreter; rows, failures and a missing package come back as words."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gym_sdk.errors import UserError
from gym_trainer.bench import peers
from gym_trainer.bench.documents import documents, plain_rows

STAND_IN = """
import json, sys
settings = json.loads(open(sys.argv[1]).read())
rows = [{"name": w["name"], "step_time_s": 0.5, "first_steps_s": 1.0, "peak_memory_bytes": 0, "loss": 2.0, "other": 1}
        for w in settings["ways"] if not w["padding_free"]]
failures = {w["name"]: "no kernel" for w in settings["ways"] if w["padding_free"]}
open(sys.argv[-1], "w").write(json.dumps({"version": "9.9", "rows": rows, "failures": failures}))
"""


def test_every_way_of_a_peer_is_a_row_or_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_trl_script.py").write_text(STAND_IN)
    monkeypatch.setattr(peers, "_HERE", tmp_path)
    ways = peers.trl_ways("cpu", ("float32", "bfloat16"), 4, lora=True)
    report = peers.run_trl(sys.executable, {"ways": ways, "num_threads": 2})
    assert report.version == "9.9"
    assert [(row.name, row.dtype) for row in report.rows] == [
        (f"TRL SFTTrainer, {size} rows at once, {dtype}", dtype)
        for dtype in ("float32", "bfloat16")
        for size in (1, 2, 4)
    ]
    assert report.failures == {
        f"TRL SFTTrainer, padding-free, {dtype}": "no kernel" for dtype in ("float32", "bfloat16")
    }


def test_on_a_card_trl_is_tried_with_and_without_recomputation_and_liger() -> None:
    names = [way["name"] for way in peers.trl_ways("cuda", ("bfloat16",), 4, lora=True)]
    assert names == [
        "TRL SFTTrainer, every layer recomputed",
        "TRL SFTTrainer, every layer recomputed, Liger",
        "TRL SFTTrainer, nothing recomputed",
        "TRL SFTTrainer, nothing recomputed, Liger",
    ]


@pytest.mark.parametrize(
    ("run", "arguments", "name"), [("run_trl", (), "trl"), ("run_unsloth", ("folder",), "unsloth")]
)
def test_an_interpreter_without_the_peer_is_one_message(run: str, arguments: tuple[str, ...], name: str) -> None:
    with pytest.raises(UserError, match=f"--{name} .*: ModuleNotFoundError: No module named '{name}'"):
        getattr(peers, run)(sys.executable, {"num_threads": 1, "ways": []}, *map(Path, arguments))
    with pytest.raises(UserError, match=f"--{name} /no/python: No such file"):
        getattr(peers, run)("/no/python", {"num_threads": 1}, *map(Path, arguments))


def test_rows_for_a_peer_train_the_same_tokens() -> None:
    made = documents((5, 4), (2, 0), 50)
    rows = plain_rows(made)
    assert [row["labels"][:2] for row in rows] == [[-100, -100], rows[1]["input_ids"][:2]]
    assert rows[0]["labels"][2:] == rows[0]["input_ids"][2:]
    json.dumps(rows)
