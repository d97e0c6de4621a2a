"""A folder of finished things, named by what they were made from.

An entry is made in a temporary folder beside its place, flushed to the disk, and renamed into it: it is there whole or
not at all, whenever the process is killed. A lock file keeps two processes from doing the same work twice.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def file_sha256(path: Path) -> str:
    """The hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_once(place: Path, make: Callable[[Path], None]) -> Path:
    """Return the folder `place`, calling `make(temporary_folder)` to fill it when it does not exist yet.

    Safe among processes: one makes it, the others wait for it. If `make` raises, nothing is left behind.
    """
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if place.is_dir():  # another process made it while this one waited
            return place
        temporary = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
        try:
            make(temporary)
            flush_tree(temporary)
            temporary.chmod(0o755)
            temporary.rename(place)
            _flush(place.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return place


def flush_tree(folder: Path) -> None:
    """Force a folder's files, and then its names, to the disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder; its renames are journalled
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
