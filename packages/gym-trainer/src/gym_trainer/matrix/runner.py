"""The whole matrix: architectures side by side, each in its own process, results kept so that a killed run goes on."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gym_trainer.matrix.architectures import Architecture
from gym_trainer.matrix.checks import CHECKS, Outcome, Row
from gym_trainer.matrix.child import read_result, run_child

# The libraries are loaded once, in a server that forks a child for every architecture and never computes itself.
_PRELOAD = ["peft", "gym_trainer.matrix.checks"]


def run_matrix(
    architectures: Sequence[Architecture],
    results: Path,
    *,
    jobs: int = 1,
    timeout_s: float = 180.0,
    memory_bytes: int = 6 * 2**30,
    again: Callable[[Row], bool] = lambda row: False,
    on_row: Callable[[Row, bool], None] = lambda row, is_new: None,
) -> list[Row]:
    """A row for each architecture. Those in `results`, made by the same versions, are not made again unless `again`
    says so; `on_row` hears each row, and whether it is new."""
    results.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)

    def one(architecture: Architecture) -> Row:
        path = results / f"{architecture.model_type}.json"
        kept = read_result(path)
        if kept is not None and not again(row := row_of(kept)):
            on_row(row, False)
            return row
        path.unlink(missing_ok=True)
        log = path.with_suffix(".log")
        child = context.Process(target=run_child, args=(architecture, path, log, memory_bytes))
        child.start()
        child.join(timeout_s)
        ended = _end(child, timeout_s)
        made = read_result(path)
        row = row_of(made) if made is not None else _without_result(architecture, ended)
        on_row(row, True)
        return row

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        return list(pool.map(one, architectures))


def row_of(data: dict[str, Any]) -> Row:
    """A row from its plain data."""
    checks = {name: Outcome(**outcome) for name, outcome in data["checks"].items()}
    plain: dict[str, Any] = data | {"aliases": tuple(data["aliases"]), "checks": checks}
    return Row(**plain)


def _end(child: Any, timeout_s: float) -> str:
    """How the process ended; one that has not is killed."""
    if child.is_alive():
        child.kill()
        child.join()
        return f"no result within {timeout_s:.0f} s"
    code = child.exitcode
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with code {code} and no result"


def _without_result(architecture: Architecture, ended: str) -> Row:
    return Row(
        model_type=architecture.model_type,
        class_name=architecture.class_name,
        group=architecture.group,
        aliases=architecture.aliases,
        checks=dict.fromkeys(CHECKS, Outcome(status="fail", note=ended)),
    )
