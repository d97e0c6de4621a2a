"""Uploads: they go on where they broke off, and become files once their content is checked."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import sqlite3
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from gym_serve._database import Database
from gym_serve.auth import Key
from gym_serve.errors import Reason, ServiceError, invalid, not_found
from gym_serve.files import store
from gym_serve.files.announced import TRAINING_PURPOSE, Announced
from gym_serve.files.blobs import CHUNK_BYTES, BlobStore
from gym_serve.files.check import check_training_data
from gym_serve.files.store import File, Upload
from gym_serve.settings import LimitSettings


@dataclass(frozen=True, kw_only=True)
class Progress:
    """An upload and how much of it is here."""

    upload: Upload
    received_bytes: int


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Content that is here and is no file yet."""

    id: str
    size_bytes: int


class UploadService:
    """What both HTTP and gRPC call to send content, in chunks, in parts or in one piece."""

    def __init__(self, database: Database, blobs: BlobStore, limits: LimitSettings) -> None:
        self._database = database
        self._blobs = blobs
        self._limits = limits
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def begin(self, key: Key, announced: Announced) -> Progress:
        """Begins an upload, or finds the one that the same key began with the same request id.

        Raises `ServiceError` for names, sizes and quotas.
        """
        announced.check(self._limits)
        upload = announced.upload(key, f"upload_{secrets.token_hex(12)}")

        def transaction(connection: sqlite3.Connection) -> Upload:
            request_id = announced.request_id
            if request_id is not None and (known := store.upload_by_request(connection, key.id, request_id)):
                announced.check_is(known)
                return known
            self._check_quota(connection, key, announced.size_bytes)
            store.insert_upload(connection, upload)
            return upload

        return await self._progress(await self._database.write(transaction))

    async def upload(self, key: Key, upload_id: str) -> Progress:
        """An upload and the offset from which to go on."""
        return await self._progress(await self._own_upload(key, upload_id))

    async def append(self, key: Key, upload_id: str, offset: int, data: bytes | memoryview) -> int:
        """Adds a chunk and returns how many bytes are here. Bytes that are here already may be sent again."""
        upload = await self._own_upload(key, upload_id, pending=True)
        if offset < 0:
            raise invalid("the offset must not be negative", field="offset")
        if offset + len(data) > upload.size_bytes:
            raise invalid(
                f"the chunk ends at byte {offset + len(data)}, and the upload was announced with {upload.size_bytes}",
                field="data",
            )
        async with self._locks[upload_id]:
            received = await asyncio.to_thread(self._blobs.append, upload_id, offset, data)
        if time.time() - upload.touched_at > 60:
            now = time.time()
            await self._database.write(lambda connection: store.touch_upload(connection, upload_id, now))
        return received

    async def add_part(self, key: Key, upload_id: str, data: AsyncIterator[bytes]) -> tuple[str, float]:
        """Adds a part, whose place is said at completion, and returns its id and time."""
        upload = await self._own_upload(key, upload_id, pending=True)
        part_id, now = f"part_{secrets.token_hex(12)}", time.time()
        try:
            size_bytes = await self._write(part_id, data, upload.size_bytes)

            def transaction(connection: sqlite3.Connection) -> None:
                store.insert_part(connection, part_id, upload_id, size_bytes, now)
                store.touch_upload(connection, upload_id, now)

            await self._database.write(transaction)
        except BaseException:
            self._blobs.discard(part_id)
            raise
        return part_id, now

    async def complete(
        self, key: Key, upload_id: str, *, part_ids: Sequence[str] | None = None, md5: str | None = None
    ) -> File:
        """Makes an upload a file, checked. Completing a completed one gives the same file."""
        upload = await self._own_upload(key, upload_id)
        if upload.state == "completed" and upload.file_id is not None:
            return await own_file(self._database, key, upload.file_id)
        _check_pending(upload)
        async with self._locks[upload_id]:
            if part_ids is not None:
                known = await self._database.read(lambda connection: store.parts(connection, upload_id))
                for part_id in part_ids:
                    if part_id not in known:
                        raise not_found(Reason.UPLOAD_NOT_FOUND, part_id, field="part_ids")
                if len(set(part_ids)) != len(part_ids):
                    raise invalid("a part is named twice", field="part_ids")
                if (total := sum(known[part_id] for part_id in part_ids)) != upload.size_bytes:
                    raise invalid(
                        f"the parts have {total} bytes together, and the upload was announced with {upload.size_bytes}",
                        field="part_ids",
                    )
                await asyncio.to_thread(self._blobs.join, upload_id, list(part_ids))
            received = await asyncio.to_thread(self._blobs.received, upload_id)
            if received != upload.size_bytes:
                raise ServiceError(
                    Reason.WRONG_STATE,
                    f"{received} of {upload.size_bytes} bytes are here",
                    hint=f"send from byte {received}",
                )
            if md5 is not None:
                await asyncio.to_thread(self._check_md5, upload_id, md5)
            file = await self._store(upload)
        self._locks.pop(upload_id, None)
        return file

    async def cancel(self, key: Key, upload_id: str) -> Upload:
        """Drops an upload."""
        upload = await self._own_upload(key, upload_id)
        if upload.state != "cancelled":
            _check_pending(upload)
            await self.end(upload, "cancelled")
        return await self._own_upload(key, upload_id)

    async def receive(self, data: AsyncIterator[bytes]) -> Draft:
        """Writes content whose name and purpose are not known yet. `keep` or `drop` must follow."""
        draft_id = f"upload_{secrets.token_hex(12)}"
        try:
            size_bytes = await self._write(draft_id, data, self._limits.max_file_bytes)
        except BaseException:
            # Not awaited: the client that went away must not leave its bytes behind.
            self._blobs.discard(draft_id)
            raise
        return Draft(id=draft_id, size_bytes=size_bytes)

    def drop(self, draft: Draft) -> None:
        """Removes what was received."""
        self._blobs.discard(draft.id)

    async def keep(
        self,
        key: Key,
        draft: Draft,
        *,
        filename: str,
        purpose: str,
        expires_after_s: float | None = None,
        reuse_s: float = 0.0,
    ) -> File:
        """Makes what was received a file, checked. With `reuse_s`, the same content under the same name and purpose
        that this key sent within that time is the same file: the official client sends again without a key for it."""
        try:
            announced = Announced(
                filename=filename, purpose=purpose, size_bytes=draft.size_bytes, expires_after_s=expires_after_s
            )
            announced.check(self._limits)
            upload = announced.upload(key, draft.id)

            def transaction(connection: sqlite3.Connection) -> None:
                self._check_quota(connection, key, draft.size_bytes)
                store.insert_upload(connection, upload)

            await self._database.write(transaction)
        except BaseException:
            self.drop(draft)
            raise
        try:
            return await self._store(upload, reuse_s=reuse_s)
        except BaseException:
            await asyncio.shield(self.end(upload, "cancelled"))
            raise

    async def create(
        self, key: Key, *, filename: str, purpose: str, data: AsyncIterator[bytes], expires_after_s: float | None = None
    ) -> File:
        """`receive` and `keep` in one."""
        draft = await self.receive(data)
        return await self.keep(key, draft, filename=filename, purpose=purpose, expires_after_s=expires_after_s)

    async def _write(self, name: str, data: AsyncIterator[bytes], limit: int) -> int:
        size_bytes = 0
        buffer = bytearray()
        async for chunk in data:
            buffer += chunk
            if size_bytes + len(buffer) > limit:
                raise ServiceError(
                    Reason.REQUEST_INVALID, f"more than the {limit} bytes that are allowed here", http_status=413
                )
            if len(buffer) >= CHUNK_BYTES:
                size_bytes = await asyncio.to_thread(self._blobs.append, name, size_bytes, bytes(buffer))
                buffer.clear()
        return await asyncio.to_thread(self._blobs.append, name, size_bytes, bytes(buffer))

    async def _store(self, upload: Upload, *, reuse_s: float = 0.0) -> File:
        """Checks the content, makes it a blob, and its row a file, in that order."""
        try:
            sha256, size_bytes = await asyncio.to_thread(self._blobs.finish, upload.id, upload.sha256)
        except ServiceError:
            await self.end(upload, "cancelled")
            raise
        row_format, num_rows = None, None
        if upload.purpose == TRAINING_PURPOSE:
            try:
                row_format, num_rows = await check_training_data(self._blobs.path(sha256), upload.filename)
            except ServiceError:
                await self.end(upload, "cancelled")
                await self._remove_unused(sha256)
                raise
        now = time.time()
        file = File(
            id=f"file-{secrets.token_hex(12)}",
            owner=upload.owner,
            filename=upload.filename,
            purpose=upload.purpose,
            sha256=sha256,
            size_bytes=size_bytes,
            created_at=now,
            expires_at=now + upload.expires_after_s if upload.expires_after_s else None,
            format=row_format,
            num_rows=num_rows,
        )

        def transaction(connection: sqlite3.Connection) -> File:
            if reuse_s > 0:
                for recent in store.page_of_files(
                    connection, owner=upload.owner, purpose=upload.purpose, after=None, limit=8
                ):
                    same = (recent.sha256, recent.filename) == (sha256, upload.filename)
                    if same and now - recent.created_at < reuse_s:
                        store.set_upload_state(connection, upload.id, "completed", recent.id)
                        return recent
            store.insert_file(connection, file)
            store.set_upload_state(connection, upload.id, "completed", file.id)
            return file

        return await self._database.write(transaction)

    async def _remove_unused(self, sha256: str) -> None:
        used = await self._database.read(store.used_content)
        if sha256 not in used:
            await asyncio.to_thread(self._blobs.remove, sha256)

    async def end(self, upload: Upload, state: store.UploadState) -> None:
        """Drops what is here of an upload that became no file."""
        names = [upload.id, *await self._database.read(lambda connection: store.parts(connection, upload.id))]

        def transaction(connection: sqlite3.Connection) -> None:
            if store.get_upload(connection, upload.id).state == "pending":
                store.set_upload_state(connection, upload.id, state)

        await self._database.write(transaction)
        for name in names:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._blobs.discard, name)
        self._locks.pop(upload.id, None)

    async def _own_upload(self, key: Key, upload_id: str, *, pending: bool = False) -> Upload:
        upload = await self._database.read(lambda connection: store.get_upload(connection, upload_id))
        if not key.may_see(upload.owner):
            raise not_found(Reason.UPLOAD_NOT_FOUND, upload_id)
        if pending:
            _check_pending(upload)
        return upload

    async def _progress(self, upload: Upload) -> Progress:
        if upload.state == "completed":
            return Progress(upload=upload, received_bytes=upload.size_bytes)
        received = await asyncio.to_thread(self._blobs.received, upload.id)
        return Progress(upload=upload, received_bytes=received)

    def _check_quota(self, connection: sqlite3.Connection, key: Key, size_bytes: int) -> None:
        limit = key.quota.max_storage_bytes
        if limit is None:
            limit = self._limits.max_storage_bytes_per_key
        used = store.stored_bytes(connection, key.id)
        if used + size_bytes > limit:
            raise ServiceError(
                Reason.QUOTA_EXCEEDED,
                f"{size_bytes} more bytes would be above this key's {limit}, of which {used} are used",
                hint="delete files that are no longer needed",
            )

    def _check_md5(self, upload_id: str, md5: str) -> None:
        digest = hashlib.md5(usedforsecurity=False)
        for chunk in self._blobs.read_incoming(upload_id):
            digest.update(chunk)
        if digest.hexdigest() != md5.lower():
            raise invalid(f"the content's MD5 is {digest.hexdigest()}, not {md5}", field="md5")


def _check_pending(upload: Upload) -> None:
    if upload.state != "pending":
        raise ServiceError(Reason.WRONG_STATE, f"upload '{upload.id}' is {upload.state}")


async def own_file(database: Database, key: Key, file_id: str) -> File:
    """A file that a key may see."""
    file = await database.read(lambda connection: store.get_file(connection, file_id))
    if not key.may_see(file.owner):
        raise not_found(Reason.FILE_NOT_FOUND, file_id)
    return file
