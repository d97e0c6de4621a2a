"""Bytes between this machine's disk and the wire."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from gym_sdk.errors import UserError, Where

CHUNK_BYTES = 1024 * 1024
"""A cut line loses one at most; on a slow line each is still a few seconds."""
READ_BYTES = 1024 * 1024


def file_size(path: str | os.PathLike[str]) -> int:
    """Size in bytes of a file that is to be sent. Raises UserError where it is none."""
    source = Path(path)
    if not source.is_file():
        kind = "is a folder; upload its files" if source.is_dir() else "there is no such file"
        raise UserError(kind, where=Where(file=str(path)))
    return source.stat().st_size


def file_sha256(path: Path) -> tuple[int, str]:
    """Size in bytes and sha256 of a file."""
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            size_bytes += len(block)
    return size_bytes, digest.hexdigest()


def read_chunk(path: Path, offset: int, size_bytes: int) -> bytes:
    """A piece of a file."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size_bytes)


def stable_request_id(name: str, purpose: str, sha256: str) -> str:
    """The same for the same file, so that a later process goes on with the upload of an earlier one."""
    return hashlib.sha256("\0".join(("upload", name, purpose, sha256)).encode("utf-8", "surrogatepass")).hexdigest()[
        :32
    ]


class PartFile:
    """A file that grows beside its target and takes its name once it is whole."""

    def __init__(self, target: Path, sha256: str) -> None:
        self.target = target
        self.path = target.with_name(f".{target.name}.{sha256[:16]}.part")
        self.size_bytes = 0
        self._sha256 = sha256
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        self.size_bytes = self._file.tell()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, offset: int, data: bytes) -> None:
        """Append the bytes that belong at `offset`; what is there already is passed over."""
        if self._file is None or offset > self.size_bytes:
            raise ValueError(f"bytes at {offset} do not follow {self.size_bytes}")
        fresh = data[self.size_bytes - offset :]
        self._file.write(fresh)
        self._file.flush()
        self.size_bytes += len(fresh)

    def finish(self) -> bool:
        """Give the file its name, if its sha256 is right; otherwise delete it. Returns whether it was right."""
        if file_sha256(self.path)[1] != self._sha256:
            self.path.unlink()
            return False
        os.replace(self.path, self.target)
        return True
