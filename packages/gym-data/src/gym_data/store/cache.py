"""Folders that are complete or absent, named by what went into them."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson


def cache_key(*inputs: Any) -> str:
    """A name for the result of `inputs`, which are JSON values."""
    return hashlib.sha256(orjson.dumps(inputs, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]


def file_sha256(path: Path) -> str:
    """The digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_folder(parent: Path, key: str, build: Callable[[Path], None]) -> tuple[Path, bool]:
    """`(parent/key, whether it was there)`; built in a folder beside it and renamed when complete.

    Two processes that build the same key both finish; the first rename wins and the other's work is dropped. A killed
    process leaves only a folder whose name is never looked up; those that are a day old are removed.
    """
    final = parent / key
    if final.is_dir():
        return final, True
    parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(parent)
    unfinished = parent / f".{key}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    try:
        build(unfinished)
        _sync_folder(unfinished)
        try:
            unfinished.rename(final)
        except OSError:
            if not final.is_dir():
                raise
        _sync_folder(parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return final, False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(parent: Path, age_s: float = 86400.0) -> None:
    now = max((entry.stat().st_mtime for entry in os.scandir(parent)), default=0.0)
    for entry in os.scandir(parent):
        if entry.name.startswith(".") and entry.is_dir() and now - entry.stat().st_mtime > age_s:
            shutil.rmtree(entry.path, ignore_errors=True)
