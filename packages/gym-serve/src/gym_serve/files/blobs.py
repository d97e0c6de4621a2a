"""Content by its SHA-256: written once, never changed, read by many.

    blobs/ab/abcdef...      complete content
    incoming/<upload>       what has arrived of an upload; its size is the offset at which to go on

Content is moved in by rename after its digest was checked, so a blob is complete or not there.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from gym_serve.errors import Reason, ServiceError

CHUNK_BYTES = 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")


class BlobStore:
    """The two folders below `root`. Every method blocks on the disk: call them in a thread."""

    def __init__(self, root: Path) -> None:
        self._blobs = root / "blobs"
        self._incoming = root / "incoming"
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._incoming.mkdir(parents=True, exist_ok=True)

    def path(self, sha256: str) -> Path:
        """Where a blob is, or would be."""
        assert _SHA256.fullmatch(sha256), "digests come from the database"
        return self._blobs / sha256[:2] / sha256

    def received(self, upload: str) -> int:
        """How many bytes of an upload are here."""
        try:
            return self._part(upload).stat().st_size
        except FileNotFoundError:
            return 0

    def append(self, upload: str, offset: int, data: bytes | memoryview) -> int:
        """Writes a chunk and returns the new size.

        What is here already is not written again, so a chunk may be sent twice. A gap is refused.
        """
        with self._part(upload).open("ab") as file:
            here = file.tell()
            if offset > here:
                raise ServiceError(
                    Reason.OFFSET_MISMATCH,
                    f"the chunk begins at byte {offset}, and the upload has {here} bytes",
                    hint=f"send from byte {here}",
                    metadata={"received_bytes": str(here)},
                )
            if offset + len(data) > here:
                file.write(data[here - offset :])
                here = file.tell()
        return here

    def finish(self, upload: str, expected_sha256: str | None) -> tuple[str, int]:
        """Makes an upload a blob and returns its digest and size. A wrong digest removes what had arrived."""
        part = self._part(upload)
        part.touch()
        with part.open("rb") as file:
            os.fsync(file.fileno())
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        size_bytes = part.stat().st_size
        if expected_sha256 is not None and sha256 != expected_sha256.lower():
            self.discard(upload)
            raise ServiceError(
                Reason.CHECKSUM_MISMATCH,
                f"the content's SHA-256 is {sha256}, not {expected_sha256}; what had arrived was removed",
                field="sha256",
                hint="send the file again",
            )
        target = self.path(sha256)
        target.parent.mkdir(exist_ok=True)
        if target.exists():
            part.unlink()
            os.utime(target)  # young again, so that no collection that runs just now takes it away
        else:
            part.chmod(0o440)
            part.rename(target)
            _sync(target.parent)
        return sha256, size_bytes

    def discard(self, upload: str) -> None:
        """Drops an upload."""
        self._part(upload).unlink(missing_ok=True)

    def read(self, sha256: str, offset: int, length: int) -> Iterator[bytes]:
        """The content from `offset`, at most `length` bytes, in chunks."""
        with self.path(sha256).open("rb") as file:
            file.seek(offset)
            while length > 0 and (chunk := file.read(min(CHUNK_BYTES, length))):
                length -= len(chunk)
                yield chunk

    def read_incoming(self, upload: str) -> Iterator[bytes]:
        """What has arrived of an upload, in chunks."""
        with self._part(upload).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def link(self, sha256: str, target: Path) -> None:
        """Puts a blob's content at `target`, without a copy where the file system allows that."""
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        link_or_copy(self.path(sha256), target)

    def remove(self, sha256: str) -> None:
        """Removes a blob; whoever has it open or linked keeps it."""
        self.path(sha256).unlink(missing_ok=True)

    def older_than(self, age_s: float) -> Iterator[str]:
        """The digests of the blobs that have been here for longer than this."""
        limit = time.time() - age_s
        for folder in self._blobs.iterdir():
            for path in folder.iterdir():
                if _SHA256.fullmatch(path.name) and path.stat().st_ctime < limit:
                    yield path.name

    def incoming_older_than(self, age_s: float) -> list[str]:
        """The names of what is arriving and was not added to for longer than this."""
        limit = time.time() - age_s
        return [path.name for path in self._incoming.iterdir() if path.stat().st_mtime < limit]

    def take(self, upload: str, content: bytes | Path, *, link: bool) -> None:
        """Puts content of this machine where uploads arrive."""
        part = self._part(upload)
        if isinstance(content, bytes):
            part.write_bytes(content)
        elif link:
            link_or_copy(content, part)
        else:
            shutil.copyfile(content, part)

    def join(self, upload: str, parts: list[str]) -> None:
        """Makes an upload of other ones, in this order. They are gone then."""
        with self._part(upload).open("wb") as target:
            for name in parts:
                with self._part(name).open("rb") as source:
                    shutil.copyfileobj(source, target, CHUNK_BYTES)
        for name in parts:
            self.discard(name)

    def _part(self, upload: str) -> Path:
        assert _NAME.fullmatch(upload), "upload ids are made by the daemon"
        return self._incoming / upload


def link_or_copy(source: Path, target: Path) -> None:
    """The same content at another place, without a copy where the file system allows that."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
