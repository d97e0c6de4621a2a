"""gym.v1.FileService."""

from __future__ import annotations

from collections.abc import AsyncIterator

from gym_sdk._proto.gym.v1 import files_pb2 as pb
from gym_serve.call import Call
from gym_serve.errors import Reason, ServiceError, invalid
from gym_serve.files.announced import Announced
from gym_serve.files.service import FileService
from gym_serve.files.uploads import Progress
from gym_serve.grpc import convert


class FileRpc:
    """Methods by their names in the schema."""

    def __init__(self, files: FileService, upload_expiry_s: float) -> None:
        self._files = files
        self._expiry_s = upload_expiry_s

    async def CreateUpload(self, request: pb.CreateUploadRequest, call: Call) -> pb.CreateUploadResponse:
        """Begins an upload, unless this key has the content already."""
        purpose = convert.purpose_of(request.purpose)
        if not request.sha256:
            raise invalid("the SHA-256 of the content is needed", field="sha256")
        known = await self._files.find_content(call.key, request.sha256, purpose)
        if known is not None and known.size_bytes == request.size_bytes:
            return pb.CreateUploadResponse(file=convert.file_message(known))
        progress = await self._files.uploads.begin(
            call.key,
            Announced(
                filename=request.filename,
                purpose=purpose,
                size_bytes=request.size_bytes,
                sha256=request.sha256,
                request_id=request.request_id or None,
                expires_after_s=request.expire_after_s if request.HasField("expire_after_s") else None,
            ),
        )
        if progress.upload.file_id is not None:
            file = await self._files.file(call.key, progress.upload.file_id)
            return pb.CreateUploadResponse(file=convert.file_message(file))
        return pb.CreateUploadResponse(upload=self._message(progress))

    async def GetUpload(self, request: pb.GetUploadRequest, call: Call) -> pb.GetUploadResponse:
        """Where an upload stands."""
        return pb.GetUploadResponse(upload=self._message(await self._files.uploads.upload(call.key, request.upload_id)))

    async def UploadChunk(self, request: pb.UploadChunkRequest, call: Call) -> pb.UploadChunkResponse:
        """Appends bytes."""
        if len(request.data) > convert.MAX_CHUNK_BYTES:
            raise invalid(f"a chunk has at most {convert.MAX_CHUNK_BYTES} bytes", field="data")
        received = await self._files.uploads.append(call.key, request.upload_id, request.offset_bytes, request.data)
        return pb.UploadChunkResponse(received_bytes=received)

    async def CompleteUpload(self, request: pb.CompleteUploadRequest, call: Call) -> pb.CompleteUploadResponse:
        """Checks and keeps the file."""
        file = await self._files.uploads.complete(call.key, request.upload_id)
        return pb.CompleteUploadResponse(file=convert.file_message(file))

    async def CancelUpload(self, request: pb.CancelUploadRequest, call: Call) -> pb.CancelUploadResponse:
        """Drops an upload."""
        await self._files.uploads.cancel(call.key, request.upload_id)
        return pb.CancelUploadResponse()

    async def GetFile(self, request: pb.GetFileRequest, call: Call) -> pb.GetFileResponse:
        """A file."""
        return pb.GetFileResponse(file=convert.file_message(await self._files.file(call.key, request.file_id)))

    async def ListFiles(self, request: pb.ListFilesRequest, call: Call) -> pb.ListFilesResponse:
        """This key's files, the newest first."""
        filters = {"purpose": request.purpose}
        after, size = convert.read_page(request.page_size, request.page_token, filters)
        purpose = None
        if request.purpose != pb.FILE_PURPOSE_UNSPECIFIED:
            purpose = convert.purpose_of(request.purpose)
        found = await self._files.files(call.key, purpose=purpose, after=after, limit=size + 1)
        return pb.ListFilesResponse(
            files=[convert.file_message(file) for file in found[:size]],
            next_page_token=convert.next_page_token(found[size - 1].id, filters) if len(found) > size else "",
        )

    async def DeleteFile(self, request: pb.DeleteFileRequest, call: Call) -> pb.DeleteFileResponse:
        """Removes a file."""
        await self._files.delete(call.key, request.file_id)
        return pb.DeleteFileResponse()

    async def DownloadFile(self, request: pb.DownloadFileRequest, call: Call) -> AsyncIterator[pb.DownloadFileResponse]:
        """The bytes from an offset on."""
        file = await self._files.file(call.key, request.file_id)
        offset = request.offset_bytes
        if offset > file.size_bytes:
            raise ServiceError(
                Reason.OFFSET_MISMATCH,
                f"the file has {file.size_bytes} bytes, and byte {offset} was asked for",
                field="offset_bytes",
            )
        yield pb.DownloadFileResponse(file=convert.file_message(file), offset_bytes=offset)
        async for chunk in self._files.read(file, offset, file.size_bytes - offset):
            yield pb.DownloadFileResponse(offset_bytes=offset, data=chunk)
            offset += len(chunk)

    def _message(self, progress: Progress) -> pb.Upload:
        return convert.upload_message(progress.upload, progress.received_bytes, self._expiry_s)
