"""`gym models`: what a daemon can answer with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cyclopts import App

from gym_sdk.cli import console
from gym_sdk.cli._connection import AsJson, ConnectionOptions, connect
from gym_sdk.cli._table import age, local_time, out_fields, out_list, plain
from gym_sdk.client.types import FilePurpose, ModelInfo, ModelKind
from gym_sdk.errors import UserError, Where

app: App = App(name="gym models", help="Models of a daemon: bases, adapters, experiences.", version_flags=[])


@app.command(name="list")
def list_models(
    *,
    kind: ModelKind | None = None,
    base: str = "",
    limit: int = 50,
    as_json: AsJson = False,
    connection: ConnectionOptions = None,
) -> None:
    """List models: bases first, then the newest.

    Parameters
    ----------
    kind
        Only base, adapter or experiences.
    base
        Only what belongs to this base.
    limit
        At most so many.
    as_json
        Print JSON.
    """
    with connect(connection) as gym:
        models = list(gym.models.list(kind=kind, base_model_id=base, limit=limit))
    out_list(models, _COLUMNS, as_json=as_json, empty="no models")


_COLUMNS: dict[str, Callable[[ModelInfo], object]] = {
    "ID": lambda model: model.id,
    "KIND": lambda model: model.kind or "?",
    "STATE": lambda model: model.state or "?",
    "BASE": lambda model: model.base_model_id or model.source,
    "ALIASES": lambda model: ", ".join(model.aliases),
    "AGE": lambda model: age(model.create_time),
}


@app.command
def get(model_id: str, /, *, as_json: AsJson = False, connection: ConnectionOptions = None) -> None:
    """Show a model, by id or alias.

    Parameters
    ----------
    model_id
        The model.
    as_json
        Print JSON.
    """
    with connect(connection) as gym:
        model = gym.models.get(model_id)
    console.out_json(plain(model)) if as_json else _show(model)


def _show(model: ModelInfo) -> None:
    lineage = model.lineage
    out_fields(
        {
            "id": model.id,
            "kind": model.kind or "unknown to this gym",
            "state": model.state or "unknown to this gym",
            "why": model.state_message,
            "aliases": ", ".join(model.aliases),
            "base": model.base_model_id,
            "source": model.source,
            "revision": model.revision,
            "context": f"{model.context_length:,} tokens" if model.context_length else "",
            "size": console.format_size(model.size_bytes) if model.size_bytes else "",
            "sha256": model.sha256,
            "made by": lineage.job_id,
            "from": lineage.parent_model_id,
            "created": local_time(model.create_time),
        }
    )


@app.command
def add(
    source: str,
    /,
    *,
    base: str | None = None,
    revision: str = "",
    name: str = "",
    as_json: AsJson = False,
    connection: ConnectionOptions = None,
) -> None:
    """Register a model; prints its id.

    Parameters
    ----------
    source
        A hub id or package:module/file.gguf for a base (needs an admin key). With --base, on this machine: a folder
        with an adapter in Hugging Face layout, or a library of experiences (library.yaml or its folder).
    base
        The base that the adapter belongs to; the base or adapter that the library stands in front of.
    revision
        Of a hub model: branch, tag or commit.
    name
        The name to give it.
    as_json
        Print JSON.
    """
    with connect(connection) as gym:
        if base is None:
            model = gym.models.create_base(source, revision=revision, name=name)
        elif (library := _library_file(Path(source))) is not None:
            model = gym.models.create_experiences(
                base, gym.files.upload(library, FilePurpose.ADAPTER).id, name=name or _run_name(library)
            )
        else:
            files: dict[str, str] = {}
            for path in _adapter_files(Path(source)):
                with console.progress(path.stat().st_size, "bytes", path.name) as progress:
                    file = gym.files.upload(
                        path, FilePurpose.ADAPTER, on_progress=lambda done, total: progress.update(done, total)
                    )
                files[path.name] = file.id
            model = gym.models.create_adapter(base, files, name=name)
    console.out_json(plain(model)) if as_json else console.out(model.id)


def _library_file(path: Path) -> Path | None:
    """The library that a path names: its file, its folder, or the run that made it."""
    if path.suffix in (".yaml", ".yml"):
        return path
    found = (folder / "library.yaml" for folder in (path, path / "experience"))
    return next((file for file in found if file.is_file()), None)


def _run_name(library: Path) -> str:
    """The run's name, where the library lies in one."""
    run = library.parent.parent
    return run.name if (run / "run.json").is_file() else ""


def _adapter_files(folder: Path) -> list[Path]:
    where = Where(file=str(folder))
    if not folder.is_dir():
        raise UserError("is not a folder with an adapter", where=where)
    wanted = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in (".json", ".safetensors", ".jinja", ".model", ".txt")
    ]
    if not any(path.name == "adapter_config.json" for path in wanted):
        raise UserError("has no adapter_config.json", where=where)
    if not any(path.suffix == ".safetensors" for path in wanted):
        raise UserError("has no adapter_model.safetensors", where=where, hint="pickle files are not taken")
    return wanted


@app.command
def load(model_id: str, /, *, connection: ConnectionOptions = None) -> None:
    """Put a model into the engine, and wait until it answers."""
    with connect(connection) as gym:
        console.err(f"model {model_id} is {gym.models.load(model_id).state}")


@app.command
def unload(model_id: str, /, *, connection: ConnectionOptions = None) -> None:
    """Take a model out of the engine once its running requests have ended."""
    with connect(connection) as gym:
        console.err(f"model {model_id} is {gym.models.unload(model_id).state}")


@app.command
def alias(name: str, model_id: str | None = None, /, *, connection: ConnectionOptions = None) -> None:
    """Let a name mean a model; without a model, let it mean nothing.

    Parameters
    ----------
    name
        The alias.
    model_id
        What it means from now on.
    """
    with connect(connection) as gym:
        if model_id is None:
            gym.models.delete_alias(name)
            console.err(f"{name} means nothing now")
        else:
            console.err(f"{name} means {gym.models.set_alias(name, model_id).id} now")


@app.command
def delete(*model_ids: str, connection: ConnectionOptions = None) -> None:
    """Unload models and delete their files."""
    with connect(connection) as gym:
        for model_id in model_ids:
            gym.models.delete(model_id)
            console.err(f"model {model_id} is deleted")
