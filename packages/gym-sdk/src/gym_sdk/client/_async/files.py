"""Files: sent and fetched in pieces, going on where a line broke, checked by sha256."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from gym_sdk._proto.gym.v1 import files_pb2 as pb
from gym_sdk.client import _convert
from gym_sdk.client._async._primitives import sleep, to_thread
from gym_sdk.client._async.caller import AsyncCaller
from gym_sdk.client._async.pages import all_pages
from gym_sdk.client._progress import OnProgress, quiet
from gym_sdk.client._retry import Backoff, may_reconnect
from gym_sdk.client._transfer import CHUNK_BYTES, PartFile, file_sha256, file_size, read_chunk, stable_request_id
from gym_sdk.client.errors import Conflict, InvalidRequest, NotFound, RemoteError, ServerFault
from gym_sdk.client.types import FileInfo, FilePurpose
from gym_sdk.errors import UserError, Where


class AsyncFiles:
    """The files of a daemon's store."""

    def __init__(self, caller: AsyncCaller) -> None:
        self._caller = caller

    async def upload(
        self,
        path: str | os.PathLike[str],
        purpose: FilePurpose | str = FilePurpose.DATASET,
        *,
        filename: str | None = None,
        on_progress: OnProgress = quiet,
        expire_after_s: int | None = None,
    ) -> FileInfo:
        """Send a file; returns it as the daemon keeps it, validated where it is a dataset.

        Content that the daemon has already is not sent again, and an upload that broke off, in this process or an
        earlier one, goes on where it stood. `on_progress(done, total)` counts bytes.
        """
        file_size(path)
        source = Path(path)
        size_bytes, sha256 = await to_thread(file_sha256, source)
        name = filename or source.name
        request = pb.CreateUploadRequest(
            request_id=stable_request_id(name, str(purpose), sha256),
            filename=name,
            purpose=_convert.file_purpose(purpose),
            size_bytes=size_bytes,
            sha256=sha256,
            expire_after_s=expire_after_s,
        )
        try:
            return await self._send(source, request, on_progress)
        except (NotFound, Conflict) as error:
            if error.reason not in ("UPLOAD_NOT_FOUND", "FILE_NOT_FOUND", "WRONG_STATE", "REQUEST_ID_REUSED"):
                raise
        # The upload of that name has ended and its file is gone: begin another.
        request.request_id = uuid.uuid4().hex
        return await self._send(source, request, on_progress)

    async def _send(self, source: Path, request: pb.CreateUploadRequest, on_progress: OnProgress) -> FileInfo:
        created = await self._caller.unary("FileService/CreateUpload", request, pb.CreateUploadResponse)
        if created.WhichOneof("result") == "file":
            on_progress(request.size_bytes, request.size_bytes)
            return _convert.file_info(created.file)
        upload = created.upload
        chunk_bytes = min(CHUNK_BYTES, upload.max_chunk_bytes or CHUNK_BYTES)
        offset = upload.received_bytes
        on_progress(offset, request.size_bytes)
        while offset < request.size_bytes:
            data = await to_thread(read_chunk, source, offset, chunk_bytes)
            if not data:
                raise UserError("became shorter while it was sent", where=Where(file=str(source)))
            chunk = pb.UploadChunkRequest(upload_id=upload.id, offset_bytes=offset, data=data)
            try:
                answer = await self._caller.unary("FileService/UploadChunk", chunk, pb.UploadChunkResponse)
                offset = answer.received_bytes
            except InvalidRequest as error:
                if error.reason != "OFFSET_MISMATCH":
                    raise
                # Another process sends the same file, or an answer was lost: go on where the daemon stands.
                get = pb.GetUploadRequest(upload_id=upload.id)
                known = await self._caller.unary("FileService/GetUpload", get, pb.GetUploadResponse)
                if known.upload.received_bytes == offset:
                    raise
                offset = known.upload.received_bytes
            on_progress(offset, request.size_bytes)
        complete = pb.CompleteUploadRequest(upload_id=upload.id)
        completed = await self._caller.unary("FileService/CompleteUpload", complete, pb.CompleteUploadResponse)
        return _convert.file_info(completed.file)

    async def download(self, file_id: str, path: str | os.PathLike[str], *, on_progress: OnProgress = quiet) -> Path:
        """Fetch a file to `path` (into it where it is a folder); returns where it is.

        The bytes stand in a part file beside the target until their sha256 is right; a download that broke off, in
        this process or an earlier one, goes on where it stood. A target that has the content already stays.
        """
        info = await self.get(file_id)
        target = Path(path)
        if target.is_dir():
            # Only the last part of the name: what someone called a file is no path on this machine.
            target = target / (Path(info.filename.replace("\\", "/")).name or info.id)
        if target.is_file() and await to_thread(file_sha256, target) == (info.size_bytes, info.sha256):
            on_progress(info.size_bytes, info.size_bytes)
            return target
        part = PartFile(target, info.sha256)
        await self._fetch(info, part, on_progress)
        if not await to_thread(part.finish):
            raise ServerFault(
                f"the content of {info.id} has another sha256 than it should; the download was discarded",
                code="DATA_LOSS",
            )
        return target

    async def _fetch(self, info: FileInfo, part: PartFile, on_progress: OnProgress) -> None:
        backoff, quiet_since_s = Backoff(), time.monotonic()
        with part:
            while part.size_bytes < info.size_bytes:
                request = pb.DownloadFileRequest(file_id=info.id, offset_bytes=part.size_bytes)
                try:
                    stream = self._caller.stream("FileService/DownloadFile", request, pb.DownloadFileResponse)
                    async for piece in stream:
                        if piece.data:
                            await to_thread(part.write, piece.offset_bytes, piece.data)
                            on_progress(part.size_bytes, info.size_bytes)
                            backoff.reset()
                            quiet_since_s = time.monotonic()
                    if part.size_bytes < info.size_bytes:
                        raise ServerFault("the download ended early", code="UNKNOWN")
                except RemoteError as error:
                    patience_s = self._caller.patience_s
                    waited_s = time.monotonic() - quiet_since_s
                    if not may_reconnect(error) or (patience_s is not None and waited_s > patience_s):
                        raise
                    await sleep(backoff.next_delay_s(error))

    async def get(self, file_id: str) -> FileInfo:
        """One file."""
        request = pb.GetFileRequest(file_id=file_id)
        return _convert.file_info((await self._caller.unary("FileService/GetFile", request, pb.GetFileResponse)).file)

    async def list(
        self, *, purpose: FilePurpose | str | None = None, limit: int | None = None
    ) -> AsyncIterator[FileInfo]:
        """Files, newest first."""

        async def fetch(token: str) -> tuple[Sequence[pb.File], str]:
            request = pb.ListFilesRequest(page_token=token, purpose=_convert.file_purpose(purpose))
            page = await self._caller.unary("FileService/ListFiles", request, pb.ListFilesResponse)
            return page.files, page.next_page_token

        async for file in all_pages(fetch, limit):
            yield _convert.file_info(file)

    async def delete(self, file_id: str) -> None:
        """Delete a file; its content goes when nothing else has it."""
        await self._caller.unary("FileService/DeleteFile", pb.DeleteFileRequest(file_id=file_id), pb.DeleteFileResponse)
