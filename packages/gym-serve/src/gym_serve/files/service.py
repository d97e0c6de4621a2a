"""Files: named content of keys and jobs, kept once by its SHA-256 and removed when nothing names it any more."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

from gym_serve._database import Database
from gym_serve.auth import Key
from gym_serve.files import store
from gym_serve.files.blobs import BlobStore
from gym_serve.files.store import File
from gym_serve.files.uploads import UploadService, own_file
from gym_serve.logs import audit
from gym_serve.settings import FileSettings, LimitSettings

logger: logging.Logger = logging.getLogger(__name__)

_SUFFIX = re.compile(r"(\.[A-Za-z0-9]{1,8}){1,2}$")
_COLLECT_AGE_S = 3600.0


class FileService:
    """What both HTTP and gRPC call."""

    def __init__(self, database: Database, blobs: BlobStore, limits: LimitSettings, settings: FileSettings) -> None:
        self._database = database
        self._blobs = blobs
        self._settings = settings
        self.uploads: UploadService = UploadService(database, blobs, limits)

    async def keep_result(
        self, owner: str, file_id: str, filename: str, purpose: str, content: bytes | Path, *, link: bool = False
    ) -> File:
        """Keeps what a job made under an id that is known beforehand, outside its owner's quota. With `link`, a large
        file is shared with the place where it lies instead of copied. Again does nothing."""
        known = await self._database.read(lambda connection: store.find_file(connection, file_id))
        if known is not None:
            return known
        name = f"result_{secrets.token_hex(12)}"
        await asyncio.to_thread(self._blobs.take, name, content, link=link)
        sha256, size_bytes = await asyncio.to_thread(self._blobs.finish, name, None)
        file = File(
            id=file_id,
            owner=owner,
            filename=filename,
            purpose=purpose,
            sha256=sha256,
            size_bytes=size_bytes,
            created_at=time.time(),
        )
        await self._database.write(lambda connection: store.insert_file(connection, file))
        return file

    async def find_content(self, key: Key, sha256: str, purpose: str) -> File | None:
        """A file of this key with this content, so that it need not be sent."""
        return await self._database.read(
            lambda connection: store.file_with_content(connection, key.id, sha256.lower(), purpose)
        )

    async def file(self, key: Key, file_id: str) -> File:
        """A file that this key may see."""
        return await own_file(self._database, key, file_id)

    async def files(
        self, key: Key, *, purpose: str | None = None, after: str | None = None, limit: int, ascending: bool = False
    ) -> list[File]:
        """A page of this key's files."""
        if after is not None:
            await self.file(key, after)
        return await self._database.read(
            lambda connection: store.page_of_files(
                connection, owner=key.id, purpose=purpose, after=after, limit=limit, ascending=ascending
            )
        )

    async def delete(self, key: Key, file_id: str) -> None:
        """Removes a file. Jobs that were made with it keep its content."""
        file = await self.file(key, file_id)
        if file.owner != key.id:
            audit.info("file of another key: deleted", extra={"by": key.name, "file": file_id, "owner": file.owner})
        await self._database.write(lambda connection: store.delete_file(connection, file_id))

    async def read(self, file: File, offset: int, length: int) -> AsyncIterator[bytes]:
        """A file's content from `offset`."""
        chunks = self._blobs.read(file.sha256, offset, length)
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            yield chunk

    def link(self, file: File, folder: Path) -> Path:
        """Puts a file's content into a folder under a name made of its id and its ending, and returns that path.
        Blocks on the disk."""
        suffix = match.group(0).lower() if (match := _SUFFIX.search(file.filename)) else ""
        target = folder / f"{file.id}{suffix}"
        self._blobs.link(file.sha256, target)
        return target

    def place(self, file: File, target: Path) -> None:
        """Puts a file's content at a path. Blocks on the disk."""
        self._blobs.link(file.sha256, target)

    async def collect(self, *, min_age_s: float = _COLLECT_AGE_S) -> int:
        """Removes idle uploads, files whose time is over, and content that nothing names; returns how many contents."""
        now = time.time()
        for upload in await self._database.read(
            lambda connection: store.idle_uploads(connection, now - self._settings.upload_expiry_s)
        ):
            logger.info("upload %s: nothing arrived for too long; dropped", upload.id)
            await self.uploads.end(upload, "expired")
        await self._database.write(lambda connection: store.delete_expired_files(connection, now))
        used, pending = await self._database.read(
            lambda connection: (store.used_content(connection), store.pending_names(connection))
        )

        def remove() -> int:
            unused = [sha256 for sha256 in self._blobs.older_than(min_age_s) if sha256 not in used]
            for sha256 in unused:
                self._blobs.remove(sha256)
            return len(unused)

        # What a killed daemon was writing; young enough, it may belong to a call that goes on just now.
        for name in await asyncio.to_thread(self._blobs.incoming_older_than, min_age_s):
            if name not in pending:
                await asyncio.to_thread(self._blobs.discard, name)
        return await asyncio.to_thread(remove)

    async def collect_forever(self) -> None:
        """`collect`, every so often."""
        while True:
            await asyncio.sleep(self._settings.collect_every_s)
            try:
                await self.collect()
            except Exception:
                logger.exception("collecting garbage failed; it is tried again")
