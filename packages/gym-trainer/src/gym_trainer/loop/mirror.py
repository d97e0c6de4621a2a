"""A second place for a run's checkpoints, for machines that may vanish: a folder, or a URL that fsspec knows.

The mirror has the layout of the run's own folder, so that a run whose machine is gone goes on from it. A checkpoint's
manifest is copied last: until it is there, the copy is incomplete and never used.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from gym_sdk.errors import UserError
from gym_sdk.events import EventWriter
from gym_trainer.loop import checkpoint

_RUN_FILES = ("run.json", "spec.yaml", "plan.json", "events.jsonl", "data/report.json", "evaluation/before.json")
"""What a resumed run needs beside a checkpoint, and what it would otherwise do again."""


class Mirror:
    """One run's copy at a place."""

    def __init__(self, fs: Any, root: str) -> None:
        """Prefer `open_mirror`."""
        self._fs = fs
        self._root = root

    def push_run(self, run: Path) -> None:
        """Copy the run's small files."""
        for name in _RUN_FILES:
            if (run / name).is_file():
                self._put(run / name, name)

    def push_checkpoint(self, folder: Path) -> None:
        """Copy a complete checkpoint, and drop those that the run itself has dropped."""
        name = f"checkpoints/{folder.name}"
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in sorted(files, key=lambda path: path.name == checkpoint.MANIFEST_NAME):
            self._put(path, f"{name}/{path.relative_to(folder).as_posix()}")
        kept = {path.name for path in checkpoint.steps_on_disk(folder.parent).values()}
        for other in self._checkpoints():
            if other not in kept:
                # The manifest first: a kill on the way leaves no checkpoint that looks complete.
                manifest = f"{self._root}/checkpoints/{other}/{checkpoint.MANIFEST_NAME}"
                if self._fs.exists(manifest):
                    self._fs.rm_file(manifest)
                self._fs.rm(f"{self._root}/checkpoints/{other}", recursive=True)

    def pull_newer(self, checkpoints_dir: Path) -> Path | None:
        """Fetch the newest complete checkpoint, where it is newer than every complete one on this machine."""
        own, _ = checkpoint.newest(checkpoints_dir)
        own_step = _step(own.name) if own is not None else 0
        for name in sorted(self._checkpoints(), key=_step, reverse=True):
            if _step(name) <= own_step:
                return None
            staged = checkpoints_dir / f"{checkpoint.STAGING_NAME}-pulled"
            shutil.rmtree(staged, ignore_errors=True)
            source = f"{self._root}/checkpoints/{name}"
            if not self._fs.exists(f"{source}/{checkpoint.MANIFEST_NAME}"):
                continue
            for path in self._fs.find(source):
                target = staged / str(path)[len(source) :].lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                self._fs.get_file(path, str(target))
            if checkpoint.problem(staged) is None:
                final = checkpoints_dir / name
                if final.exists():
                    checkpoint.remove(final)
                staged.rename(final)
                return final
            shutil.rmtree(staged)
        return None

    def pull_run(self, run: Path) -> None:
        """Fetch the run's small files into a new folder.

        Raises:
            UserError: there is no run at this place.
        """
        if not self._fs.exists(f"{self._root}/run.json"):
            raise UserError(f"{self._root} is not a run: it has no run.json", hint="name the run's own folder there")
        for name in _RUN_FILES:
            if self._fs.exists(f"{self._root}/{name}"):
                (run / name).parent.mkdir(parents=True, exist_ok=True)
                self._fs.get_file(f"{self._root}/{name}", str(run / name))
        (run / "checkpoints").mkdir(exist_ok=True)

    def read_text(self, name: str) -> str:
        """One of the run's small files.

        Raises:
            UserError: it is not there.
        """
        try:
            return self._fs.cat_file(f"{self._root}/{name}").decode("utf-8")
        except FileNotFoundError:
            raise UserError(f"{self._root} is not a run: it has no {name}") from None

    def _put(self, path: Path, name: str) -> None:
        target = f"{self._root}/{name}"
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._fs.put_file(str(path), target)

    def _checkpoints(self) -> list[str]:
        folder = f"{self._root}/checkpoints"
        if not self._fs.exists(folder):
            return []
        names = [str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in self._fs.ls(folder, detail=True)]
        return [name for name in names if name.startswith("checkpoint-") and name.removeprefix("checkpoint-").isdigit()]


def open_mirror(url: str, run_name: str | None = None) -> Mirror:
    """The mirror of a run below `url`, or at it when no name is given.

    Raises:
        UserError: a kind of URL that fsspec does not know, or whose package is not installed; a file of this machine.
    """
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    try:
        fs, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"output.mirror: {url} cannot be used: {error}") from None
    root = str(root).rstrip("/")
    if isinstance(fs, LocalFileSystem) and fs.isfile(root):
        raise UserError(f"output.mirror: {url} is a file", hint="name a folder; it is made where there is none")
    return Mirror(fs, f"{root}/{run_name}" if run_name is not None else root)


class MirrorCallback(TrainerCallback):
    """Copies every checkpoint. A place that cannot be reached is a warning: training goes on."""

    def __init__(self, mirror: Mirror, run: Path, events: EventWriter) -> None:
        self.mirror = mirror
        self.run = run
        self.events = events

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        try:
            self.mirror.push_checkpoint(Path(args.output_dir) / f"checkpoint-{state.global_step}")
            self.mirror.push_run(self.run)
        except Exception as error:  # noqa: BLE001 - every file system has errors of its own
            self.events.log(
                "warning", f"the checkpoint was not copied to output.mirror: {type(error).__name__}: {error}"
            )


def _step(name: str) -> int:
    return int(name.rpartition("-")[2])
