"""TRL and Unsloth on the same work, each in an interpreter that has it, each tried in several settings.

Neither is a dependency: they change libraries in place or ask for other versions of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_sdk.errors import UserError

_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class PeerRow:
    """One way of a peer."""

    name: str
    step_time_s: float
    first_steps_s: float
    peak_memory_bytes: int
    loss: float
    first_loss: float | None = None
    dtype: str = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class PeerReport:
    """All ways of one peer."""

    version: str
    rows: list[PeerRow]
    failures: dict[str, str]


def trl_ways(device: str, dtypes: tuple[str, ...], num_rows: int, *, lora: bool) -> list[dict[str, Any]]:
    """Settings of TRL in which its best is looked for: rows at once, padding or none, recomputation, kernels."""
    plain = {"padding_free": False, "recompute": False, "liger": False}
    ways: list[dict[str, Any]] = []
    if device == "cuda":
        for recompute in (True, False):
            for liger in (False, True):
                words = ["every layer recomputed" if recompute else "nothing recomputed", *["Liger"] * liger]
                ways.append(plain | {"words": words, "recompute": recompute, "liger": liger, "rows_at_once": num_rows})
    else:
        sizes = sorted({size for size in (1, 2, 4, num_rows) if num_rows % size == 0})
        ways += [plain | {"words": [f"{size} rows at once"], "rows_at_once": size} for size in sizes]
        ways.append(plain | {"words": ["padding-free"], "rows_at_once": num_rows, "padding_free": True})
    return [
        way | {"dtype": dtype, "name": ", ".join(["TRL SFTTrainer", *way["words"], *[dtype] * (len(dtypes) > 1)])}
        for dtype in dtypes
        for way in ways
    ]


def run_trl(python: str, settings: dict[str, Any]) -> PeerReport:
    """Raises UserError where the interpreter is none or has no TRL."""
    return _run(python, "_trl_script.py", "trl", settings, [])


def run_unsloth(python: str, settings: dict[str, Any], folder: Path) -> PeerReport:
    """On a folder of weights. Raises UserError where the interpreter is none or has no Unsloth."""
    return _run(python, "_unsloth_script.py", "unsloth", settings, [str(folder)])


def _run(python: str, script: str, name: str, settings: dict[str, Any], arguments: list[str]) -> PeerReport:
    with tempfile.TemporaryDirectory(prefix="gym-bench-") as scratch:
        given, out = Path(scratch) / "settings.json", Path(scratch) / "out.json"
        given.write_text(json.dumps(settings), encoding="utf-8")
        command = [python, str(_HERE / script), str(given), *arguments, str(out)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if settings.get("num_threads"):
            environment["OMP_NUM_THREADS"] = str(settings["num_threads"])
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        except OSError as error:
            raise UserError(
                f"--{name} {python}: {error.strerror}", hint=f"name the interpreter of an environment with {name}"
            ) from None
        if not out.is_file():
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise UserError(f"--{name} {python}: {reason}", hint=f"it must have {name}, torch and peft")
        found = json.loads(out.read_text(encoding="utf-8"))
    return PeerReport(
        version=found["version"], rows=list(_rows(found["rows"], settings)), failures=dict(found["failures"])
    )


def _rows(rows: list[dict[str, Any]], settings: dict[str, Any]) -> Iterator[PeerRow]:
    dtypes = {way["name"]: way["dtype"] for way in settings.get("ways", [])}
    known = set(PeerRow.__dataclass_fields__)
    for row in rows:
        yield PeerRow(**{k: v for k, v in row.items() if k in known}, dtype=dtypes.get(row["name"], "bfloat16"))
