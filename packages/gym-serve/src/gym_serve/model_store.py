"""The files of models that this daemon keeps: copied once, under the digest of their content, and never changed."""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from gym_data.experience import LIBRARY_FILE, MANIFEST_FILE, PROVENANCE_FILE, read_library
from gym_sdk.errors import ModelError
from gym_serve.files.blobs import link_or_copy
from gym_serve.models import inspect_adapter

_ADAPTER_FILES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}\.(safetensors|json|jinja|txt|model|md)")


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A version's files in the store."""

    folder: Path
    content_id: str
    size_bytes: int


class ModelStore:
    """One folder with a folder for each version. Its methods block on the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(parents=True, exist_ok=True)

    def keep_only(self, used: Collection[Path]) -> None:
        """Removes versions that were replaced, and copies that a kill cut short."""
        for path in self._path.iterdir():
            if path not in used:
                shutil.rmtree(path, ignore_errors=True)

    def copy_adapter(self, folder: Path) -> Kept:
        """An adapter's files. Raises `ModelError` for what is none: a pickle, nothing in it, a damaged file."""
        content_id = inspect_adapter(folder).content_id
        files = sorted(path for path in folder.iterdir() if _ADAPTER_FILES.fullmatch(path.name) and path.is_file())
        # Beside the weights, the template and the tokenizer decide what the model answers: they are the version too.
        return self._copy(files, content_id)

    def copy_experiences(self, folder: Path) -> Kept:
        """A library's files. Raises `DataError` for what is none."""
        library = read_library(folder)
        files = [folder / name for name in (LIBRARY_FILE, MANIFEST_FILE, PROVENANCE_FILE) if (folder / name).is_file()]
        return self._copy(files, library.sha256)

    def _copy(self, files: list[Path], content_id: str) -> Kept:
        digest = hashlib.sha256(content_id.encode())
        for path in files:
            digest.update(f"\0{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
        target = self._path / digest.hexdigest()[:32]
        if not target.exists():
            draft = self._path / f".{target.name}.{secrets.token_hex(4)}"
            draft.mkdir()
            try:
                for path in files:
                    shutil.copyfile(path, draft / path.name)
                draft.rename(target)
            except OSError:
                shutil.rmtree(draft, ignore_errors=True)
                if not target.exists():
                    raise
        size_bytes = sum(path.stat().st_size for path in target.iterdir())
        return Kept(folder=target, content_id=f"sha256:{digest.hexdigest()}", size_bytes=size_bytes)

    def link_model(self, folder: Path, job_id: str) -> tuple[Path, int]:
        """A whole model that a job has made, and the size of its weights; linked where that can be done."""
        target = self._path / job_id
        if not target.exists():
            draft = self._path / f".{target.name}.{secrets.token_hex(4)}"
            shutil.copytree(
                folder, draft, copy_function=lambda source, target: link_or_copy(Path(source), Path(target))
            )
            draft.rename(target)
        return target, sum(path.stat().st_size for path in target.rglob("*.safetensors"))


def check_upload_name(names: Iterable[str]) -> None:
    """Raises `ModelError` unless every name is a plain file of an adapter: no folder, nothing that can run code."""
    for name in names:
        if not _ADAPTER_FILES.fullmatch(name):
            raise ModelError(
                f"'{name}' is no file of an adapter",
                hint="adapter_config.json, adapter_model.safetensors, tokenizer and template files; never a pickle",
            )
