"""OpenAI's `/v1/files` and `/v1/uploads`."""

from __future__ import annotations

import json
import re
from typing import Annotated, ClassVar, Literal
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gym_serve.errors import Reason, ServiceError, invalid
from gym_serve.files.announced import Announced
from gym_serve.files.service import FileService
from gym_serve.files.store import File, Upload
from gym_serve.files.uploads import Progress
from gym_serve.http.errors import read_body
from gym_serve.http.gateway import call_of
from gym_serve.http.multipart import parts

_RESEND_S = 600.0
"""The official client sends a request again when it was not answered; within this time it is the same file."""


class ExpiresAfter(BaseModel):
    """When a file is removed by itself."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2592000)]


class CreateUpload(BaseModel):
    """`POST /v1/uploads`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")
    bytes: Annotated[int, Field(ge=0)]
    filename: str
    mime_type: str = ""
    purpose: str
    expires_after: ExpiresAfter | None = None


class CompleteUpload(BaseModel):
    """`POST /v1/uploads/{id}/complete`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")
    part_ids: Annotated[list[str], Field(max_length=10_000)]
    md5: str | None = None


def file_object(file: File) -> dict[str, object]:
    """OpenAI's `file`; what it does not have goes under names of our own."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": int(file.created_at),
        "expires_at": int(file.expires_at) if file.expires_at else None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
        "sha256": file.sha256,
        "num_rows": file.num_rows,
        "format": file.format,
    }


def _upload_object(upload: Upload, expiry_s: float, file: File | None = None) -> dict[str, object]:
    return {
        "id": upload.id,
        "object": "upload",
        "bytes": upload.size_bytes,
        "created_at": int(upload.created_at),
        "expires_at": int(upload.touched_at + expiry_s),
        "filename": upload.filename,
        "purpose": upload.purpose,
        "status": upload.state,
        "file": file_object(file) if file else None,
    }


def file_routes(files: FileService, upload_expiry_s: float) -> list[Route]:
    """The routes."""

    async def create(request: Request) -> Response:
        purpose: str | None = None
        expires: dict[str, str] = {}
        draft, filename = None, ""
        try:
            async for part in parts(request):
                if part.name == "file" and part.filename is not None:
                    if draft is not None:
                        raise invalid("send one file a call", field="file")
                    draft, filename = await files.uploads.receive(part.data), part.filename
                elif part.name == "purpose":
                    purpose = await part.text()
                elif match := re.fullmatch(r"expires_after\[(anchor|seconds)\]", part.name):
                    expires[match.group(1)] = await part.text()
                else:
                    await part.text()
            if draft is None:
                raise invalid("the form has no file in the part 'file'", field="file")
            if purpose is None:
                raise invalid("the form has no part 'purpose'", field="purpose")
            seconds = _expiry(expires)
        except BaseException:
            if draft is not None:
                files.uploads.drop(draft)
            raise
        file = await files.uploads.keep(
            call_of(request).key,
            draft,
            filename=filename,
            purpose=purpose,
            expires_after_s=seconds,
            reuse_s=_RESEND_S if request.headers.get("x-stainless-retry-count", "0") != "0" else 0.0,
        )
        return JSONResponse(file_object(file))

    async def list_(request: Request) -> Response:
        limit = query_number(request, "limit", 10_000, 1, 10_000)
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("order is asc or desc", field="order")
        found = await files.files(
            call_of(request).key,
            purpose=request.query_params.get("purpose"),
            after=request.query_params.get("after"),
            limit=limit + 1,
            ascending=order == "asc",
        )
        return JSONResponse(page([file_object(file) for file in found], limit))

    async def retrieve(request: Request) -> Response:
        return JSONResponse(file_object(await files.file(call_of(request).key, request.path_params["file_id"])))

    async def delete(request: Request) -> Response:
        file_id = request.path_params["file_id"]
        await files.delete(call_of(request).key, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def content(request: Request) -> Response:
        file = await files.file(call_of(request).key, request.path_params["file_id"])
        begin, end, partial = _range(request.headers.get("range"), request.headers.get("if-range"), file)
        headers = {
            "content-length": str(end - begin),
            "accept-ranges": "bytes",
            "etag": f'"{file.sha256}"',
            "content-disposition": f"attachment; filename*=UTF-8''{_quoted(file.filename)}",
        }
        if partial:
            headers["content-range"] = f"bytes {begin}-{end - 1}/{file.size_bytes}"
        return StreamingResponse(
            files.read(file, begin, end - begin),
            status_code=206 if partial else 200,
            media_type="application/octet-stream",
            headers=headers,
        )

    async def create_upload(request: Request) -> Response:
        body = await read_body(request, CreateUpload)
        progress: Progress = await files.uploads.begin(
            call_of(request).key,
            Announced(
                filename=body.filename,
                purpose=body.purpose,
                size_bytes=body.bytes,
                expires_after_s=body.expires_after.seconds if body.expires_after else None,
            ),
        )
        return JSONResponse(_upload_object(progress.upload, upload_expiry_s))

    async def add_part(request: Request) -> Response:
        upload_id = request.path_params["upload_id"]
        added: tuple[str, float] | None = None
        async for part in parts(request):
            if part.name == "data" and added is None:
                added = await files.uploads.add_part(call_of(request).key, upload_id, part.data)
            else:
                await part.text()
        if added is None:
            raise invalid("the form has no part 'data'", field="data")
        return JSONResponse(
            {"id": added[0], "object": "upload.part", "created_at": int(added[1]), "upload_id": upload_id}
        )

    async def complete(request: Request) -> Response:
        body = await read_body(request, CompleteUpload)
        key, upload_id = call_of(request).key, request.path_params["upload_id"]
        file = await files.uploads.complete(key, upload_id, part_ids=body.part_ids, md5=body.md5)
        upload = (await files.uploads.upload(key, upload_id)).upload
        return JSONResponse(_upload_object(upload, upload_expiry_s, file))

    async def cancel(request: Request) -> Response:
        upload = await files.uploads.cancel(call_of(request).key, request.path_params["upload_id"])
        return JSONResponse(_upload_object(upload, upload_expiry_s))

    return [
        Route("/v1/files", create, methods=["POST"]),
        Route("/v1/files", list_, methods=["GET"]),
        Route("/v1/files/{file_id}", retrieve, methods=["GET"]),
        Route("/v1/files/{file_id}", delete, methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", content, methods=["GET"]),
        Route("/v1/uploads", create_upload, methods=["POST"]),
        Route("/v1/uploads/{upload_id}/parts", add_part, methods=["POST"]),
        Route("/v1/uploads/{upload_id}/complete", complete, methods=["POST"]),
        Route("/v1/uploads/{upload_id}/cancel", cancel, methods=["POST"]),
    ]


def page(items: list[dict[str, object]], limit: int) -> dict[str, object]:
    """A list as OpenAI gives it, made of at most one item more than was asked for."""
    shown = items[:limit]
    return {
        "object": "list",
        "data": shown,
        "has_more": len(items) > limit,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }


def _expiry(given: dict[str, str]) -> float | None:
    if not given:
        return None
    try:
        return ExpiresAfter.model_validate_json(
            json.dumps({"anchor": given.get("anchor"), "seconds": int(given.get("seconds", ""))})
        ).seconds
    except ValueError:
        raise invalid(
            "expires_after has the anchor created_at and from 3600 to 2592000 seconds", field="expires_after"
        ) from None


def query_number(request: Request, name: str, default: int, low: int, high: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"\d{1,9}", text) or not low <= int(text) <= high:
        raise invalid(f"{name} must be a whole number from {low} to {high}", field=name)
    return int(text)


def _range(header: str | None, if_range: str | None, file: File) -> tuple[int, int, bool]:
    """The bytes of `Range: bytes=...` as [begin, end), and whether they are a part. Several ranges give the whole."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header.strip()) if header else None
    changed = if_range is not None and if_range != f'"{file.sha256}"'
    if match is None or changed or match.group(0) == "bytes=-":
        return 0, file.size_bytes, False
    first, last = match.groups()
    if not first:
        begin, end = max(0, file.size_bytes - int(last)), file.size_bytes
    else:
        begin, end = int(first), min(file.size_bytes, int(last) + 1 if last else file.size_bytes)
    if begin >= end:
        raise ServiceError(
            Reason.OFFSET_MISMATCH,
            f"the file has {file.size_bytes} bytes; {header} begins behind its end",
            field="range",
        )
    return begin, end, True


def _quoted(filename: str) -> str:
    return quote(filename, safe="")
