"""`gym data bench`, and `gym bench data`: preparation measured on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gym_data.cli.options import AsJson, Model, model_folder
from gym_sdk.cli import console
from gym_sdk.errors import UserError


def bench(
    model: Model,
    file: Annotated[Path | None, Parameter(help="JSON Lines of chats; made-up ones when left out.")] = None,
    *,
    repetitions: Annotated[int | None, Parameter(help="How often: 5; 7 over cores; 3 with TRL.")] = None,
    fast: Annotated[bool, Parameter(help="Use gigatoken where it is installed and passes the check.")] = True,
    cores: Annotated[bool, Parameter(negative="", help="Measure two cores against one instead, by the clock.")] = False,
    trl: Annotated[str | None, Parameter(help="Measure against the TRL of this Python interpreter instead.")] = None,
    as_json: AsJson = False,
) -> int:
    """Measure how fast chats become packed tokens on one core, beside the tokenizer alone."""
    folder = model_folder(model)
    if repetitions is not None and repetitions < 1:
        raise UserError(f"--repetitions {repetitions}: must be at least 1")
    found = _measured(folder, file, {} if repetitions is None else {"repetitions": repetitions}, fast, cores, trl)
    if as_json:
        console.out_json(found)
        return 0
    for name, value in found.items():
        console.out(f"{name:<28} {value:,.2f}" if isinstance(value, float) else f"{name:<28} {value}")
    return 0


def _measured(
    folder: Path, file: Path | None, repeated: dict[str, int], fast: bool, cores: bool, trl: str | None
) -> dict[str, Any]:
    if cores:
        from gym_data.bench.cores import bench_cores

        return asdict(bench_cores(folder, file, **repeated))
    if trl is not None:
        from gym_data.bench.peer import bench_peer

        return asdict(bench_peer(folder, trl, file, **repeated))
    from gym_data.bench.stages import bench as bench_stages

    return bench_stages(folder, file, fast=fast, **repeated).to_data()
