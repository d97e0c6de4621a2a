"""The same file through TRL's own preparation for supervised fine-tuning, and its ids and masks beside ours.

TRL needs torch, so it is measured in an interpreter that has it. The model's chat template must mark its answers for
TRL (`{% generation %}`); Gym renders the same template and finds the answers by itself.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_data._prepare import prepare
from gym_data.bench.made_up import write_chats
from gym_data.encoding.tokenizer import Tokenizer
from gym_data.rendering.template import ChatTemplate
from gym_sdk.errors import RunFailed, UserError
from gym_sdk.spec.data import DataSource, DataSpec

REPETITIONS = 3
MAX_LENGTH = 2048
_SCRIPT = Path(__file__).with_name("_trl_script.py")


@dataclass(frozen=True, slots=True)
class PeerBench:
    """CPU time of both on one core, the reading of the tokenizer included; the tokenizer, template and file are the
    same."""

    peer: str
    tokenizer_path: str
    rows: int
    tokens: int
    repetitions: int
    gym_tokens_per_s: float
    peer_tokens_per_s: float
    speedup: float
    """The median over repetitions of one time divided by the other."""
    rows_with_equal_ids: int
    rows_with_equal_masks: int
    also_trained_by_peer: tuple[str, ...]
    """Texts that the peer trains and Gym does not."""
    not_trained_by_peer: tuple[str, ...]


def bench_peer(
    folder: str | Path, python: str, file: str | Path | None = None, *, repetitions: int = REPETITIONS
) -> PeerBench:
    """Measures against the TRL of the interpreter `python`. Raises UserError when it has none."""
    tokenizer = Tokenizer.from_folder(folder)
    if not ChatTemplate(tokenizer.chat_template or "").marks_generation:
        raise UserError(
            "the chat template has no {% generation %} marks, without which TRL finds no answers",
            hint="Name a folder with a training template; Gym needs no marks.",
        )
    with tempfile.TemporaryDirectory() as work:
        path = Path(file) if file is not None else write_chats(Path(work) / "chats.jsonl")
        gym_times, peer_times = [], []
        found: dict[str, Any] = {}
        made = None
        for number in range(repetitions):
            start = time.process_time()
            data = DataSpec(train=[DataSource(source=str(path))], num_workers=0, max_length=MAX_LENGTH)
            made = prepare(data, folder, cache_dir=Path(work) / f"cache-{number}", seed=0)
            gym_times.append(time.process_time() - start)
            found = _run_trl(python, folder, path, Path(work) / f"trl-{number}")
            peer_times.append(found["cpu_s"])
        assert made is not None
        with np.load(Path(work) / f"trl-{repetitions - 1}" / "rows.npz") as arrays:
            # The file itself would read an array again for every row.
            theirs: dict[str, NDArray[Any]] = {name: arrays[name] for name in arrays.files}
        starts = np.cumsum(theirs["lengths"]) - theirs["lengths"]
        equal_ids = equal_masks = 0
        more, less = set[int](), set[int]()
        for document, start, length in zip(made.train, starts, theirs["lengths"], strict=True):
            ids, mask = (theirs[name][start : start + length] for name in ("ids", "mask"))
            equal_ids += np.array_equal(ids, document.ids)
            equal_masks += np.array_equal(mask, document.loss_mask)
            if np.array_equal(ids, document.ids):
                more |= set(ids[mask > document.loss_mask].tolist())
                less |= set(ids[mask < document.loss_mask].tolist())
        tokens = made.report.tokens
        return PeerBench(
            peer=f"trl {found['version']}",
            tokenizer_path=tokenizer.fast_check.path,
            rows=len(made.train),
            tokens=tokens,
            repetitions=repetitions,
            gym_tokens_per_s=tokens / statistics.median(gym_times),
            peer_tokens_per_s=tokens / statistics.median(peer_times),
            speedup=statistics.median(peer / own for own, peer in zip(gym_times, peer_times, strict=True)),
            rows_with_equal_ids=equal_ids,
            rows_with_equal_masks=equal_masks,
            also_trained_by_peer=tuple(sorted(tokenizer.decode([id_]) for id_ in more))[:20],
            not_trained_by_peer=tuple(sorted(tokenizer.decode([id_]) for id_ in less))[:20],
        )


def _run_trl(python: str, folder: str | Path, path: Path, out: Path) -> dict[str, Any]:
    out.mkdir()
    command = [python, str(_SCRIPT), str(folder), str(path), str(out), str(MAX_LENGTH)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        raise UserError(
            f"--trl {python}: {error.strerror}", hint="Name the interpreter of an environment with TRL."
        ) from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RunFailed(f"TRL's preparation failed: {reason}", hint=f"{python} must have trl and torch.")
    return json.loads((out / "found.json").read_text(encoding="utf-8"))
