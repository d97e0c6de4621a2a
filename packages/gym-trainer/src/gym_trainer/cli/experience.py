"""`gym experience`: libraries of experiences as files: show, merge, restore an earlier version, replay a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from gym_sdk.cli import console
from gym_sdk.errors import OutputInUse, UserError, Where

app: App = App(name="experience", help="Experience libraries of training-free GRPO: show, merge, restore, replay.")


@app.command
def show(
    path: Annotated[Path, Parameter(help="A library file, an experience folder or a run's folder.")],
    *,
    json: Annotated[bool, Parameter(negative="", help="For scripts.")] = False,
) -> int:
    """Print the text that stands in the prompt."""
    from gym_data.experience import read_library

    library = read_library(_library_in(path))
    if json:
        console.out_json(
            {
                "sha256": library.sha256,
                "placement": library.placement,
                "num_tokens_estimate": library.num_tokens_estimate,
                "items": [{"id": item.id, "name": item.name, "text": item.text} for item in library.items],
            }
        )
        return 0
    console.err(
        f"{len(library.items)} items, about {library.num_tokens_estimate} tokens, in the {library.placement} message"
    )
    console.out(library.render())
    return 0


@app.command
def merge(
    first: Annotated[Path, Parameter(help="The library whose order, heading and placement are kept.")],
    *others: Annotated[Path, Parameter(help="Libraries whose items follow, without those that are there already.")],
    output: Annotated[Path, Parameter(name=("--output", "-o"), help="The file to write.")],
) -> int:
    """Merge libraries by content. The result is a library to start a run from, so that a gate can judge it."""
    from gym_data.experience import read_library, write_library

    if output.exists():
        raise OutputInUse("exists", where=Where(file=str(output)), hint="choose another file")
    library = read_library(_library_in(first))
    before = len(library.items)
    for other in others:
        library = library.merged_with(read_library(_library_in(other)))
    write_library(library, output)
    console.err(f"{before} items and {len(library.items) - before} new ones")
    console.out(str(output))
    return 0


@app.command
def restore(
    run: Annotated[Path, Parameter(help="A run's folder.")],
    version: Annotated[int | None, Parameter(help="Which accepted library, from 0; lists them when not given.")] = None,
) -> int:
    """Make an earlier accepted library of a run its library again."""
    from gym_data.experience import LIBRARY_FILE, VERSIONS_FOLDER, read_library, write_library

    folder = run / "experience"
    versions = sorted((folder / VERSIONS_FOLDER).glob("*.yaml"))
    if not versions:
        raise UserError("holds no versions of an experience library", where=Where(file=str(run)))
    if version is None:
        for number, path in enumerate(versions):
            library = read_library(path)
            console.out(f"{number}\t{len(library.items)} items\t{library.sha256[:12]}")
        return 0
    if not 0 <= version < len(versions):
        raise UserError(f"there is no version {version}", hint=f"versions 0 to {len(versions) - 1}")
    write_library(read_library(versions[version]), folder / LIBRARY_FILE)
    console.out(str(folder / LIBRARY_FILE))
    return 0


@app.command
def replay(run: Annotated[Path, Parameter(help="A run's folder, with its journal.")]) -> int:
    """Work a run out again from its journal, without a network, and say whether the results are the same bytes."""
    from gym_sdk.rundir import RunDir
    from gym_sdk.spec import load_spec
    from gym_trainer.experience.run import RESULTS, train_experience

    opened = RunDir.open(run)
    before = {name: _bytes(opened.path / name) for name in RESULTS}
    train_experience(load_spec(opened.spec_path), opened, replay=True)
    changed = {name for name, content in before.items() if content != _bytes(opened.path / name)}
    for name in RESULTS:
        console.out(f"{'changed' if name in changed else 'same'}\t{name}")
    return 1 if changed else 0


def _library_in(path: Path) -> Path:
    inner = path / "experience"
    return inner if inner.is_dir() else path


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
