"""From what a source names (a file, a glob, a folder, a hub id, a URL) to files, and from files to chunks."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from gym_data._json import loads
from gym_data.sources.chunk import Chunk
from gym_data.sources.jsonl import json_chunks, jsonl_chunks
from gym_data.sources.open_bytes import is_url, suffix_of
from gym_data.sources.tables import arrow_chunks, csv_chunks, parquet_chunks
from gym_data.sources.text import text_chunks
from gym_sdk.errors import DataError, Where

READERS: dict[str, Callable[[str, str], Iterator[Chunk]]] = {
    ".jsonl": lambda uri, encoding: jsonl_chunks(uri),
    ".ndjson": lambda uri, encoding: jsonl_chunks(uri),
    ".json": lambda uri, encoding: json_chunks(uri),
    ".csv": lambda uri, encoding: csv_chunks(uri, None, encoding),
    ".tsv": lambda uri, encoding: csv_chunks(uri, "\t", encoding),
    ".parquet": lambda uri, encoding: parquet_chunks(uri),
    ".arrow": lambda uri, encoding: arrow_chunks(uri),
    ".txt": text_chunks,
    ".md": text_chunks,
}
"""`(path or URL, encoding of its text) -> chunks`, by suffix."""
KNOWN = ", ".join(READERS)
DATASET_INFO = "dataset_info.json"
"""A description of data, not data, both where `datasets` and where LLaMA-Factory writes it."""


def files_of(source: str, split: str = "train") -> list[str]:
    """The files of a path, glob or folder, sorted; a URL as it is. Raises DataError when there are none.

    `split` chooses among those of a folder that `datasets` saved.
    """
    if is_url(source):
        return [source]
    text = str(Path(source).expanduser())
    if os.path.isdir(text):
        if saved := saved_dataset(Path(text), split):
            return saved
        found = sorted(
            os.path.join(folder, name)
            for folder, folders, names in os.walk(text)
            if not _hide(folders)
            for name in names
            if not name.startswith(".") and name != DATASET_INFO and suffix_of(name) in READERS
        )
        if not found:
            raise DataError("the folder has no data files", where=Where(file=text), hint=f"Known are {KNOWN}.")
        return found
    if os.path.exists(text):
        if not os.path.isfile(text):
            raise DataError(
                "is a pipe or a device; rows are read more than once, so they must be in a file",
                where=Where(file=text),
                hint="Write its output into a file first.",
            )
        return [text]
    if os.path.islink(text):
        raise DataError(
            f"is a link to {os.readlink(text)}, which does not exist or leads back to itself", where=Where(file=text)
        )
    if any(mark in text for mark in "*?["):
        found = sorted(path for path in glob.glob(text, recursive=True) if os.path.isfile(path))
        if found:
            return found
        raise DataError("no file matches", where=Where(file=text), hint=_near(text))
    raise DataError("the data file does not exist", where=Where(file=text), hint=_near(text))


def chunks_of(uri: str, encoding: str = "utf-8") -> Iterator[Chunk]:
    """The chunks of one file, by its suffix."""
    reader = READERS.get(suffix_of(uri))
    if reader is None:
        raise DataError(
            f"the suffix {suffix_of(uri) or '(none)'} is not known",
            where=Where(file=uri),
            hint=f"Known are {KNOWN}, also with .gz and .zst.",
        )
    yield from reader(uri, encoding)


def saved_dataset(folder: Path, split: str) -> list[str]:
    """The arrow files of a folder that `datasets` wrote with `save_to_disk`; none when it is another folder."""
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = loads(splits.read_bytes()).get("splits", [])
        if split not in names:
            raise DataError(
                f"the saved data set has no split {split!r}", where=Where(file=str(folder)), hint=f"It has {names}."
            )
        folder = folder / split
    state = folder / "state.json"
    if not (state.is_file() and (folder / DATASET_INFO).is_file()):
        return []
    try:
        return [str(folder / item["filename"]) for item in loads(state.read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError):
        raise DataError("the saved data set has no list of its files", where=Where(file=str(state))) from None


def _hide(folders: list[str]) -> bool:
    """Keeps `os.walk` out of hidden folders and in a fixed order."""
    folders[:] = sorted(name for name in folders if not name.startswith("."))
    return False


def _near(text: str) -> str | None:
    from difflib import get_close_matches

    folder, name = os.path.split(text)
    try:
        names = os.listdir(folder or ".")
    except PermissionError:
        return f"The folder {folder} may not be read by you."
    except NotADirectoryError:
        return f"{folder} is a file, not a folder."
    except OSError:
        return f"The folder {folder} does not exist either."
    near = get_close_matches(name, names, 1)
    return f"Did you mean {os.path.join(folder, near[0])}?" if near else None
