"""`gym files`: the files of a daemon's store."""

from __future__ import annotations

from collections.abc import Callable

from cyclopts import App

from gym_sdk.cli import console
from gym_sdk.cli._connection import AsJson, ConnectionOptions, connect
from gym_sdk.cli._table import age, local_time, out_fields, out_list, plain
from gym_sdk.client._transfer import file_size
from gym_sdk.client.types import FileInfo, FilePurpose
from gym_sdk.errors import UserError

app: App = App(name="gym files", help="Files of a daemon's store.", version_flags=[])


@app.command
def upload(
    *paths: str,
    purpose: FilePurpose = FilePurpose.DATASET,
    as_json: AsJson = False,
    connection: ConnectionOptions = None,
) -> None:
    """Send files; prints their ids. Goes on where an earlier upload of the same file broke off.

    Parameters
    ----------
    paths
        The files.
    purpose
        dataset (rows are validated) or adapter.
    as_json
        Print JSON.
    """
    if not paths:
        raise UserError("no file was given", hint="gym files upload rows.jsonl")
    sent: list[FileInfo] = []
    with connect(connection) as gym:
        for path in paths:
            with console.progress(file_size(path), "bytes", path) as progress:
                file = gym.files.upload(path, purpose, on_progress=lambda done, total: progress.update(done, total))
            sent.append(file)
            if file.dataset is not None:
                console.err(f"{path}: {file.dataset.num_rows:,} rows, {file.dataset.format}")
                for warning in file.dataset.warnings:
                    console.warn(f"{path}: {warning}")
            if not as_json:
                console.out(file.id)
    if as_json:
        console.out_json(plain(sent))


@app.command(name="list")
def list_files(
    *,
    purpose: FilePurpose | None = None,
    limit: int = 20,
    as_json: AsJson = False,
    connection: ConnectionOptions = None,
) -> None:
    """List files, newest first.

    Parameters
    ----------
    purpose
        Only dataset, adapter or result.
    limit
        At most so many.
    as_json
        Print JSON.
    """
    with connect(connection) as gym:
        files = list(gym.files.list(purpose=purpose, limit=limit))
    out_list(files, _COLUMNS, as_json=as_json, empty="no files; `gym files upload PATH` sends one")


_COLUMNS: dict[str, Callable[[FileInfo], object]] = {
    "ID": lambda file: file.id,
    "NAME": lambda file: file.filename,
    "PURPOSE": lambda file: file.purpose or "?",
    "SIZE": lambda file: console.format_size(file.size_bytes),
    "AGE": lambda file: age(file.create_time),
}


@app.command
def get(file_id: str, /, *, as_json: AsJson = False, connection: ConnectionOptions = None) -> None:
    """Show a file.

    Parameters
    ----------
    file_id
        The file.
    as_json
        Print JSON.
    """
    with connect(connection) as gym:
        file = gym.files.get(file_id)
    if as_json:
        console.out_json(plain(file))
        return
    out_fields(
        {
            "id": file.id,
            "name": file.filename,
            "purpose": file.purpose or "unknown to this gym",
            "size": console.format_size(file.size_bytes),
            "sha256": file.sha256,
            "rows": f"{file.dataset.num_rows:,} ({file.dataset.format})" if file.dataset else "",
            "created": local_time(file.create_time),
            "expires": local_time(file.expire_time),
        }
    )


@app.command
def download(file_id: str, path: str = ".", /, *, connection: ConnectionOptions = None) -> None:
    """Fetch a file; prints where it is. Goes on where an earlier download broke off.

    Parameters
    ----------
    file_id
        The file.
    path
        A folder, or the new file's path.
    """
    with connect(connection) as gym:
        size_bytes = gym.files.get(file_id).size_bytes
        with console.progress(size_bytes, "bytes", file_id) as progress:
            target = gym.files.download(file_id, path, on_progress=lambda done, total: progress.update(done, total))
    console.out(str(target))


@app.command
def delete(*file_ids: str, connection: ConnectionOptions = None) -> None:
    """Delete files."""
    with connect(connection) as gym:
        for file_id in file_ids:
            gym.files.delete(file_id)
            console.err(f"file {file_id} is deleted")
