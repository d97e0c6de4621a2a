"""Checkpoints that are complete or absent.

A checkpoint is written under a temporary name, each file and folder is flushed to the disk, a manifest with every
file's size and sha256 is written last, and one rename gives it the name `checkpoint-N`. A power cut may still cut
files of a renamed folder on some file systems, so the manifest is checked before a checkpoint is used; one that does
not match it is passed over by name, and the one before is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1
STAGING_NAME = ".partial"
DATA_NAME = "data"
"""The folder of the position in data that is read while training."""

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A checkpoint that cannot be used, and why."""

    path: Path
    reason: str


def commit(staged: Path, final: Path) -> None:
    """Give a fully written folder its manifest and its final name. A folder already under that name is replaced.

    A kill at any moment leaves either the temporary name or the complete checkpoint.
    """
    files = {str(path.relative_to(staged)): path for path in sorted(staged.rglob("*")) if path.is_file()}
    entries = {
        name: {"size_bytes": path.stat().st_size, "sha256": _sha256(path, sync=True)} for name, path in files.items()
    }
    manifest = staged / MANIFEST_NAME
    with manifest.open("w", encoding="utf-8") as out:
        json.dump({"version": MANIFEST_VERSION, "files": entries}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    for folder in [staged, *(path for path in staged.rglob("*") if path.is_dir())]:
        sync_folder(folder)
    if final.exists():
        shutil.rmtree(final)
    staged.rename(final)
    sync_folder(final.parent)


def problem(folder: Path) -> str | None:
    """Why a checkpoint cannot be trusted, or None when every file is as it was written."""
    manifest = folder / MANIFEST_NAME
    try:
        entries = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"{MANIFEST_NAME} is missing"
    except (ValueError, KeyError, OSError) as error:
        return f"{MANIFEST_NAME} is unreadable ({error})"
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != entry["size_bytes"]:
            return f"{name} has {size} bytes instead of {entry['size_bytes']}"
    for name, entry in entries.items():
        if _sha256(folder / name) != entry["sha256"]:
            return f"{name} has other contents than were written"
    return None


def steps_on_disk(checkpoints_dir: Path) -> dict[int, Path]:
    """Folders named `checkpoint-N`, by N, newest first."""
    if not checkpoints_dir.is_dir():
        return {}
    found = {
        int(match.group(1)): path
        for path in checkpoints_dir.iterdir()
        if path.is_dir() and (match := _CHECKPOINT.fullmatch(path.name))
    }
    return dict(sorted(found.items(), reverse=True))


def newest(checkpoints_dir: Path) -> tuple[Path | None, list[PassedOver]]:
    """The newest checkpoint that is complete, and the newer ones that are not."""
    passed_over: list[PassedOver] = []
    for path in steps_on_disk(checkpoints_dir).values():
        reason = problem(path)
        if reason is None:
            return path, passed_over
        passed_over.append(PassedOver(path, reason))
    return None, passed_over


def rotate(checkpoints_dir: Path, *, keep: int, best_step: int | None = None) -> Iterator[Path]:
    """Delete all but the `keep` newest checkpoints and the best one; yields what was deleted."""
    for number, (step, path) in enumerate(steps_on_disk(checkpoints_dir).items()):
        if number >= keep and step != best_step:
            remove(path)
            yield path


def remove(folder: Path) -> None:
    """Delete a checkpoint so that a kill on the way never leaves half of one under its name."""
    doomed = folder.with_name(f"{STAGING_NAME}-deleted-{folder.name}")
    if doomed.exists():
        shutil.rmtree(doomed)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def clean_up(checkpoints_dir: Path) -> None:
    """Remove what killed processes left under temporary names."""
    if checkpoints_dir.is_dir():
        for path in checkpoints_dir.glob(f"{STAGING_NAME}*"):
            shutil.rmtree(path)


def sync_folder(folder: Path) -> None:
    """Make a folder's entries durable; where folders cannot be opened (Windows), the rename alone has to do."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path, *, sync: bool = False) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest()
