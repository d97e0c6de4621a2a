"""The run directory: the contract between trainer, daemon and people.

runs/<name>-<id>/
  run.json                       schema version, name, id, time of creation
  spec.yaml  plan.json           the resolved specification; what was chosen and why
  events.jsonl                   one event a line
  data/  checkpoints/  adapter/ | model/ | experience/
  report.json  report.md  report.html
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gym_sdk.errors import OutputInUse, UserError, Where
from gym_sdk.events._types import RunState, StateEvent

SCHEMA_VERSION = 1
"""Of the run directory. A newer trainer reads every older one."""

ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32: sorts like the number, and has no letters that look like digits."""
ID_EPOCH_MS = 1_735_689_600_000
"""2025-01-01; 40 bits of milliseconds reach to 2059."""
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")


@dataclass(frozen=True, kw_only=True)
class RunDir:
    """One run's folder. Make it with `create` or `open`."""

    path: Path
    name: str
    id: str
    created_at: datetime
    schema_version: int

    @classmethod
    def create(cls, parent: str | os.PathLike[str], name: str) -> RunDir:
        """Make `<parent>/<name>-<id>`; ids sort by time. It appears whole or not at all.

        Raises UserError for a name that is not one, OutputInUse where the parent is not a folder.
        """
        if not NAME.match(name):
            raise UserError(
                f"{name!r} is not a run's name", hint="at most 63 letters, digits, . _ and -; a letter or digit first"
            )
        folder = Path(parent)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise OutputInUse(
                "is a file; runs need a folder", where=Where(file=str(parent)), hint="set output.dir to another folder"
            ) from None
        except OSError as error:
            raise OutputInUse(
                f"cannot be made: {error.strerror}",
                where=Where(file=str(parent)),
                hint="set output.dir to a folder you may write to",
            ) from None
        now = datetime.now(UTC)
        while True:
            run = cls(
                path=folder / f"{name}-{(run_id := new_id())}",
                name=name,
                id=run_id,
                created_at=now,
                schema_version=SCHEMA_VERSION,
            )
            draft = folder / f".{run.path.name}.tmp"
            try:
                draft.mkdir()
                (draft / "checkpoints").mkdir()
                (draft / "data").mkdir()
                _write_durably(draft / "run.json", json.dumps(run._record(), indent=1).encode() + b"\n")
                if run.path.exists():
                    raise FileExistsError(run.path)
                draft.rename(run.path)
            except FileExistsError:
                shutil.rmtree(draft, ignore_errors=True)
                continue
            except OSError as error:
                shutil.rmtree(draft, ignore_errors=True)
                raise OutputInUse(
                    f"a run cannot be made here: {error.strerror}",
                    where=Where(file=str(parent)),
                    hint="set output.dir to a folder you may write to, with space left",
                ) from None
            _sync_folder(folder)
            return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDir:
        """A run that exists. Raises UserError that says what the path is instead."""
        folder, where = Path(path), Where(file=str(path))
        if not folder.exists():
            raise UserError("there is no such run", where=where, hint=nearby_runs(folder.parent))
        if not folder.is_dir():
            raise UserError("is a file; a run is a folder", where=where, hint=nearby_runs(folder.parent))
        try:
            record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            version, name, run_id = record["schema_version"], record["name"], record["id"]
            created_at = datetime.fromisoformat(record["created_at"])
        except FileNotFoundError:
            raise UserError("is not a run: it has no run.json", where=where, hint=nearby_runs(folder)) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"its run.json cannot be read: {error}", where=where) from None
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise UserError(
                f"written by a newer gym (run version {version}; this one reads up to {SCHEMA_VERSION})",
                where=where,
                hint="upgrade gym-sdk",
            )
        return cls(path=folder, name=name, id=run_id, created_at=created_at, schema_version=version)

    @property
    def spec_path(self) -> Path:
        """The resolved specification."""
        return self.path / "spec.yaml"

    @property
    def plan_path(self) -> Path:
        """What was chosen and why; predicted beside measured."""
        return self.path / "plan.json"

    @property
    def events_path(self) -> Path:
        """One event a line."""
        return self.path / "events.jsonl"

    @property
    def data_dir(self) -> Path:
        """Fingerprint, counts and three rendered rows."""
        return self.path / "data"

    @property
    def checkpoints_dir(self) -> Path:
        """`checkpoint-N` folders, each complete."""
        return self.path / "checkpoints"

    @property
    def adapter_dir(self) -> Path:
        """The final adapter, in Hugging Face layout."""
        return self.path / "adapter"

    def named_adapter_dir(self, name: str) -> Path:
        """An adapter of `adapter.beside`, as it was; `default` is the trained one."""
        return self.adapter_dir if name == "default" else self.path / "adapters" / name

    @property
    def model_dir(self) -> Path:
        """The final whole model, in Hugging Face layout."""
        return self.path / "model"

    @property
    def experience_dir(self) -> Path:
        """The experience library of a training-free run."""
        return self.path / "experience"

    def report_path(self, suffix: str) -> Path:
        """The report: `json`, `md` or `html`."""
        return self.path / f"report.{suffix.removeprefix('.')}"

    def state(self) -> RunState:
        """Where the run stands, by the last state event; CREATED before the first."""
        # Imported here: the folder's layout is read in places that never look at events.
        from gym_sdk.events import read_events

        last = RunState.CREATED
        for event in read_events(self.events_path):
            if isinstance(event, StateEvent) and event.state is not None:
                last = event.state
        return last

    def _record(self) -> dict[str, object]:
        return {
            "schema_version": self.schema_version,
            "name": self.name,
            "id": self.id,
            "created_at": self.created_at.isoformat(timespec="milliseconds"),
        }


def new_id() -> str:
    """A short id of ten characters: eight of time (milliseconds), two of chance. Sorts by time of making."""
    number = (max(0, time.time_ns() // 1_000_000 - ID_EPOCH_MS) << 10) | secrets.randbits(10)
    return "".join(ID_ALPHABET[(number >> shift) & 31] for shift in range(45, -1, -5))


def find_runs(parent: str | os.PathLike[str]) -> list[Path]:
    """The run folders right below `parent`, newest first."""
    try:
        found = [path.parent for path in Path(parent).glob("*/run.json") if not path.parent.name.startswith(".")]
    except OSError:
        return []
    return sorted(found, key=lambda path: path.name.rsplit("-", 1)[-1], reverse=True)


def nearby_runs(parent: Path) -> str | None:
    """A hint that names the newest runs in a folder; None where there are none."""
    runs = find_runs(parent)
    return f"runs in {parent}: {', '.join(path.name for path in runs[:3])}" if runs else None


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
