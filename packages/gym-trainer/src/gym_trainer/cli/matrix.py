"""`gym matrix`: every architecture that the installed transformers knows, tried with every step of Gym."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from gym_sdk.cli import console
from gym_sdk.errors import UserError

if TYPE_CHECKING:
    from gym_trainer.matrix.architectures import Architecture


def matrix(
    *,
    only: Annotated[list[str] | None, Parameter(consume_multiple=True, help="Model types; all when not given.")] = None,
    jobs: Annotated[int, Parameter(help="Processes side by side.")] = 1,
    results: Annotated[Path | None, Parameter(help="Folder of the results; a run goes on with what is there.")] = None,
    again: Annotated[Literal["none", "failed", "all"], Parameter(help="Which kept results to make again.")] = "none",
    kept: Annotated[bool, Parameter(negative="", help="Try nothing: use the kept results alone.")] = False,
    page: Annotated[Path | None, Parameter(help="Write the whole matrix to this Markdown file.")] = None,
    timeout_s: Annotated[float, Parameter(help="The longest that one architecture may take.")] = 180.0,
    memory_gb: Annotated[float, Parameter(help="The most memory that one may use (GB of 10^9 bytes).")] = 6.0,
    json: Annotated[bool, Parameter(negative="", help="For scripts.")] = False,
) -> int:
    """Try a tiny random model of each architecture: packing, LoRA, experts, reload, merge, full training, QLoRA."""
    from dataclasses import asdict

    from gym_sdk.folders import cache_dir
    from gym_trainer.run import require_torch

    require_torch("trying architectures")

    from gym_trainer.matrix.architectures import all_architectures
    from gym_trainer.matrix.child import read_result, versions
    from gym_trainer.matrix.page import line, render, summary
    from gym_trainer.matrix.runner import run_matrix
    from gym_trainer.records import write_text

    chosen = _chosen(all_architectures(), only)
    folder = results or cache_dir() / "matrix"
    untried: list[str] = []
    if kept:
        untried = [a.model_type for a in chosen if read_result(folder / f"{a.model_type}.json") is None]
        chosen = [architecture for architecture in chosen if architecture.model_type not in untried]
    with console.progress(len(chosen), "architectures", "matrix") as bar:

        def show(row: object, is_new: bool) -> None:
            bar.advance(1)
            if is_new:
                console.err(line(row))  # pyright: ignore[reportArgumentType] - a Row, whose module is loaded late

        rows = run_matrix(
            chosen,
            folder,
            jobs=jobs,
            timeout_s=timeout_s,
            memory_bytes=int(memory_gb * 1e9),
            again=lambda row: again == "all" or (again == "failed" and not row.passed),
            on_row=show,
        )
    if page is not None:
        write_text(page, render(rows, versions(), untried=untried))
        console.err(f"wrote {page}")
    if json:
        console.out_json({"versions": versions(), "rows": [asdict(row) | {"passed": row.passed} for row in rows]})
    else:
        console.out(summary(rows))
    return 0


def _chosen(known: list[Architecture], only: list[str] | None) -> list[Architecture]:
    """Those named, by model type or alias.

    Raises:
        UserError: a name that the installed transformers does not know.
    """
    if not only:
        return known
    by_name = {
        name: architecture for architecture in known for name in (architecture.model_type, *architecture.aliases)
    }
    for name in only:
        if name not in by_name:
            raise UserError(f"transformers has no causal language model {name}", hint="gym matrix lists all it knows")
    return list(dict.fromkeys(by_name[name] for name in only))
