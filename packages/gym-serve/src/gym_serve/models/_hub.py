"""Models from the Hugging Face hub: said first, then downloaded, and used from its cache when offline."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_sdk.errors import ModelError
from gym_serve.models._suggest import nearest
from gym_serve.models.progress import ProgressCallback, human_size

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

# Pickled weights (*.bin, *.pt), other frameworks' weights and original checkpoints in subfolders stay on the hub.
_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "LICENSE*", "README.md"]
_UNWANTED = ["*/*", "consolidated*"]


def snapshot(repo_id: str, revision: str | None, report: ProgressCallback) -> tuple[Path, str]:
    """The local folder and commit of a hub model."""
    from huggingface_hub import errors as hub
    from huggingface_hub.constants import HF_HUB_OFFLINE

    with _told(repo_id, revision):
        if not HF_HUB_OFFLINE:
            try:
                return _download(repo_id, revision, report)
            except hub.DryRunError:
                pass  # the hub cannot be reached: what the cache holds may be enough
        folder = _cached(repo_id, revision)
    return folder, folder.name


def check(repo_id: str, revision: str | None) -> None:
    """Raise ModelError unless the model is in the cache, or the hub has it. Downloads nothing."""
    from huggingface_hub import errors as hub
    from huggingface_hub.constants import HF_HUB_OFFLINE

    with _told(repo_id, revision):
        try:
            _cached(repo_id, revision)
        except hub.LocalEntryNotFoundError:
            if HF_HUB_OFFLINE:
                raise
            try:
                _files(repo_id, revision)
            except hub.DryRunError as error:
                raise hub.LocalEntryNotFoundError(str(error)) from error


@contextmanager
def _told(repo_id: str, revision: str | None) -> Iterator[None]:
    """Says the hub client's errors in Gym's words."""
    from huggingface_hub import errors as hub
    from huggingface_hub.constants import HF_HUB_OFFLINE

    try:
        yield
    except hub.HFValidationError as error:
        raise ModelError(f"{repo_id!r} is neither a file, a folder, nor a hub id", hint=_hint(repo_id)) from error
    except hub.GatedRepoError as error:
        raise ModelError(
            f"{repo_id} asks you to accept its terms first",
            hint="accept them on the model's page, then log in with `hf auth login`",
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no model {repo_id}, or it is private", hint=_hint(repo_id) or "log in with `hf auth login`"
        ) from error
    except hub.RevisionNotFoundError as error:
        raise ModelError(
            f"{repo_id} has no revision {revision}", hint="see the branches on the model's page"
        ) from error
    except hub.LocalEntryNotFoundError as error:
        why = "offline mode is on (HF_HUB_OFFLINE)" if HF_HUB_OFFLINE else "the hub cannot be reached"
        hint = _hint(repo_id) or "connect and run again, or name a folder or .gguf file that is here"
        raise ModelError(f"{repo_id} is not on this machine, and {why}", hint=hint) from error
    except (hub.HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{repo_id} could not be downloaded: {error}", hint="run again: it goes on from there"
        ) from error


def _cached(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repo_id, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, local_files_only=True
        )
    )


def _files(repo_id: str, revision: str | None) -> list[DryRunFileInfo]:
    """What would be downloaded, by the hub's word."""
    from huggingface_hub import snapshot_download

    planned: list[DryRunFileInfo] = snapshot_download(
        repo_id, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, dry_run=True
    )
    if not any(file.filename.endswith(".safetensors") for file in planned):
        raise ModelError(f"{repo_id} has no safetensors weights", hint="look for a conversion of it that has")
    return planned


def _download(repo_id: str, revision: str | None, report: ProgressCallback) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download

    planned = _files(repo_id, revision)
    commit = planned[0].commit_hash
    todo = sum(file.file_size or 0 for file in planned if file.will_download)
    if todo:
        stage = f"downloading {repo_id} ({human_size(todo)})"
        report(stage, 0, todo, "bytes")
        bars = _byte_counter(stage, todo, report)
        folder = snapshot_download(
            repo_id, revision=commit, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, tqdm_class=bars
        )
        report(stage, todo, todo, "bytes")
    else:
        folder = _cached(repo_id, commit)
    return Path(folder), commit


def _byte_counter(stage: str, total: int, report: ProgressCallback) -> type:
    """A silent tqdm class that passes the bytes of every bar on to `report`."""
    from tqdm import tqdm

    lock = threading.Lock()
    furthest = 0

    class ByteCounter(tqdm):  # pyright: ignore[reportMissingTypeArgument]
        """One of the hub client's bars (bytes received, bytes written, files); the furthest in bytes is told."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            self._bytes = 0
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal furthest
            if self._counts_bytes and n:
                with lock:
                    self._bytes += int(n)
                    if self._bytes > furthest:
                        furthest = min(total, self._bytes)
                        report(stage, furthest, total, "bytes")
            return None

    return ByteCounter


def _hint(repo_id: str) -> str | None:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cached = [repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        cached = []
    if found := nearest(repo_id, cached):
        return f"{found[:-1]} (in this machine's cache)?"
    if "/" not in repo_id:
        return "a hub model is written owner/name, such as Qwen/Qwen3-8B"
    return f"in this machine's cache: {', '.join(sorted(cached)[:5])}" if cached else None
