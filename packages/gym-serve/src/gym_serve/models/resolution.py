"""From what a user names as a model to a folder in Hugging Face layout.

| source | becomes |
| --- | --- |
| `Qwen/Qwen3-8B` | a snapshot of the hub repository, at a commit |
| `./folder` | that folder |
| `./file.gguf` | the file, converted once into the cache |
| `package:module/file.gguf` | a file (or folder) inside an installed Python package |

Nothing here imports torch until a GGUF file has to be converted.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from gym_sdk.errors import ModelError
from gym_serve.models import _hub
from gym_serve.models._suggest import nearest
from gym_serve.models.cache import file_sha256
from gym_serve.models.progress import ProgressCallback, silent
from gym_serve.models.safetensors_header import header_shapes

_PACKAGE = "package:"


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """A model on this machine: a folder with `config.json`, safetensors weights and a tokenizer."""

    source: str
    """As the user wrote it."""

    kind: Literal["hub", "folder", "gguf"]

    folder: Path
    """In Hugging Face layout; do not write into it."""

    revision: str | None = None
    """The commit of a hub model."""

    known_content_id: str | None = field(default=None, repr=False)

    @cached_property
    def content_id(self) -> str:
        """What the model is, whatever its folder is called: a hub repository and commit, or a SHA-256 of the files.

        Reads every weight file of a plain folder once (about a second a gigabyte).
        """
        if self.known_content_id is not None:
            return self.known_content_id
        digest = hashlib.sha256()
        for path in sorted(self.folder.iterdir()):
            if path.is_file() and path.suffix in _CONTENT_SUFFIXES:
                digest.update(f"{path.name}\0{file_sha256(path)}\n".encode())
        return f"sha256:{digest.hexdigest()}"

    @cached_property
    def size_bytes(self) -> int:
        """The size of the weights on the disk."""
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))

    @cached_property
    def config(self) -> dict[str, object]:
        """The parsed `config.json`."""
        return json.loads((self.folder / "config.json").read_text(encoding="utf-8"))


_CONTENT_SUFFIXES = {".json", ".safetensors", ".jinja", ".model", ".txt"}


def resolve(source: str, *, revision: str | None = None, on_progress: ProgressCallback | None = None) -> ResolvedModel:
    """Find a model and return it as a local folder, downloading or converting where needed.

    A download's size is reported through `on_progress` before its first byte, and goes on where an interrupted one
    stopped. With `HF_HUB_OFFLINE=1` only what the hub's cache holds is used.

    Raises:
        ModelError: there is no such model (with the nearest names), it has no safetensors weights, or its format is
            not one that Gym reads.
    """
    report = on_progress or silent
    path = _find(source)
    if path is not None:
        return _local(source, path, report, revision)
    folder, commit = _hub.snapshot(source, revision, report)
    check_folder(folder)
    return ResolvedModel(
        source=source, kind="hub", folder=folder, revision=commit, known_content_id=f"hub:{source}@{commit}"
    )


def check_source(source: str, *, revision: str | None = None) -> None:
    """Raise the ModelError of `resolve` for a model that is not there or is no model, without a download or a
    conversion."""
    path = _find(source)
    if path is None:
        _hub.check(source, revision)
    else:
        _check_local(source, path, revision)


def _find(source: str) -> Path | None:
    """The file or folder that a source names; None for a hub id."""
    if source.startswith(_PACKAGE):
        return _in_package(source)
    path = Path(source).expanduser()
    if path.exists():
        return path.absolute()
    if _looks_like_a_path(source):
        raise ModelError(
            f"there is no file or folder {source}",
            hint=_hub_id_of(source)
            or nearest(path.name, [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else [])
            or "a hub model is written owner/name, such as Qwen/Qwen3-8B",
        )
    return None


def _hub_id_of(source: str) -> str | None:
    """The hub id in an address that was copied from a browser."""
    scheme, _, rest = source.partition("://")
    parts = rest.split("/")
    if scheme not in ("http", "https") or len(parts) < 3:
        return None
    return f"a hub model is written owner/name: {parts[1]}/{parts[2]}"


def _looks_like_a_path(source: str) -> bool:
    return (
        source.startswith((".", "/", "~"))
        or "://" in source
        or source.count("/") > 1
        or "\\" in source
        or source.endswith(".gguf")
    )


def _local(source: str, path: Path, report: ProgressCallback, revision: str | None) -> ResolvedModel:
    _check_local(source, path, revision)
    if path.is_dir():
        return ResolvedModel(source=source, kind="folder", folder=path)
    from gym_serve.models.gguf import convert_once

    folder, content_id = convert_once(path, report)
    return ResolvedModel(source=source, kind="gguf", folder=folder, known_content_id=content_id)


def _check_local(source: str, path: Path, revision: str | None) -> None:
    if revision is not None:
        raise ModelError(
            f"{source} is on this machine and has no revisions", hint="remove model.revision, or name a hub model"
        )
    if path.is_dir():
        check_folder(path)
    elif path.suffix != ".gguf":
        raise ModelError(
            f"{source} is a {path.suffix or 'plain'} file",
            hint="a model is a folder in Hugging Face layout, a .gguf file, or a hub id",
        )


def check_folder(folder: Path) -> None:
    """Raise ModelError where a folder is not a model that Gym loads: no config, no tokenizer, pickled weights only."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(
                f"{folder} holds an adapter, not a model",
                hint="train: name its base, and the adapter in adapter.init_from; serve: gym serve takes the folder",
            )
        found = sorted(folder.glob("*.gguf"))
        raise ModelError(
            f"{folder} has no config.json",
            hint=f"name the file itself: {found[0]}"
            if found
            else "a model folder has config.json, *.safetensors and tokenizer.json, as save_pretrained writes them",
        )
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        raise ModelError(
            f"{folder} has no safetensors weights" + (f" (only {pickled[0]}, a pickle file)" if pickled else ""),
            hint="pickle files can run code when opened; convert with transformers' save_pretrained first",
        )
    _check_shards(folder)
    for path in sorted(folder.glob("*.safetensors")):
        try:
            header_shapes(path)
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{folder} is damaged: {error}", hint="copy or download the file again") from error
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json",
            hint="save the fast tokenizer beside it: AutoTokenizer.from_pretrained(...).save_pretrained(folder)",
        )


def _check_shards(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        needed = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{index} has no weight_map that can be read", hint="copy or download the file again"
        ) from error
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of its {len(needed)} weight files: {missing[0]}",
            hint="the folder was copied or downloaded in part; fetch the missing files",
        )


def _in_package(source: str) -> Path:
    module, slash, inside = source.removeprefix(_PACKAGE).partition("/")
    if not slash or not inside or not module:
        raise ModelError(f"{source} does not name a file", hint="write package:module/file.gguf")
    try:
        spec = importlib.util.find_spec(module)  # finds the package without running its code
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"the Python package {module}, named by {source}, is not installed",
            hint=f"pip install {module.replace('_', '-')}",
        )
    roots = [Path(location) for location in spec.submodule_search_locations]
    for root in roots:
        path = (root / inside).resolve()
        if path.is_relative_to(root.resolve()) and path.exists():
            return path
    models = [str(p.relative_to(root)) for root in roots for p in root.rglob("*.gguf")]
    raise ModelError(
        f"the package {module} has no file {inside}",
        hint=nearest(inside, models) or (f"it has {', '.join(sorted(models)[:5])}" if models else None),
    )
