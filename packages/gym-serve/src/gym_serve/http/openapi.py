"""`GET /openapi.json`: the HTTP side as an OpenAPI 3.1 document, made of the models that requests are read with.

The calls of gym.v1 over the Connect protocol are not in it: their contract is `proto/`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gym_serve.http.files import CompleteUpload, CreateUpload
from gym_serve.http.fine_tuning import CreateJob
from gym_serve.http.messages import ChatBody, CompletionBody

PATH = "/openapi.json"
_CURSORS = (("after", "string"), ("limit", "integer"))
_REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What the document says of one call."""

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    body: type[BaseModel] | None = None
    form: dict[str, Any] | None = None
    """The properties of a multipart form."""
    query: tuple[tuple[str, str], ...] = ()
    answer: str = "application/json"
    streams: bool = False
    """Whether `stream: true` answers with server-sent events."""
    open: bool = False
    """Whether it needs no key."""


_FILE = {"type": "string", "contentMediaType": "application/octet-stream"}
OPERATIONS = (
    Operation(method="get", path="/healthz", summary="Whether the process runs.", open=True),
    Operation(method="get", path="/readyz", summary="Whether each part is ready.", open=True),
    Operation(method="get", path="/metrics", summary="Metrics for Prometheus (admin).", answer="text/plain"),
    Operation(method="get", path=PATH, summary="This document."),
    Operation(method="post", path="/v1/chat/completions", summary="Answer a chat.", body=ChatBody, streams=True),
    Operation(method="post", path="/v1/completions", summary="Continue a text.", body=CompletionBody, streams=True),
    Operation(method="get", path="/v1/models", summary="The models of the key."),
    Operation(method="get", path="/v1/models/{model_id}", summary="A model by id or alias."),
    Operation(method="delete", path="/v1/models/{model_id}", summary="Remove a model."),
    Operation(
        method="post",
        path="/v1/files",
        summary="Send a file.",
        form={
            "file": _FILE,
            "purpose": {"type": "string"},
            "expires_after[anchor]": {"type": "string"},
            "expires_after[seconds]": {"type": "string"},
        },
    ),
    Operation(
        method="get",
        path="/v1/files",
        summary="The files of the key.",
        query=(*_CURSORS, ("order", "string"), ("purpose", "string")),
    ),
    Operation(method="get", path="/v1/files/{file_id}", summary="A file."),
    Operation(
        method="get", path="/v1/files/{file_id}/content", summary="Its bytes.", answer="application/octet-stream"
    ),
    Operation(method="delete", path="/v1/files/{file_id}", summary="Remove a file."),
    Operation(method="post", path="/v1/uploads", summary="Begin an upload in parts.", body=CreateUpload),
    Operation(method="post", path="/v1/uploads/{upload_id}/parts", summary="Send a part.", form={"data": _FILE}),
    Operation(
        method="post", path="/v1/uploads/{upload_id}/complete", summary="Make the parts a file.", body=CompleteUpload
    ),
    Operation(method="post", path="/v1/uploads/{upload_id}/cancel", summary="Give an upload up."),
    Operation(method="post", path="/v1/fine_tuning/jobs", summary="Queue a fine-tuning job.", body=CreateJob),
    Operation(method="get", path="/v1/fine_tuning/jobs", summary="The jobs of the key.", query=_CURSORS),
    Operation(method="get", path="/v1/fine_tuning/jobs/{job_id}", summary="A job."),
    Operation(method="post", path="/v1/fine_tuning/jobs/{job_id}/cancel", summary="End a job for good."),
    Operation(method="post", path="/v1/fine_tuning/jobs/{job_id}/pause", summary="Stop a job for now."),
    Operation(method="post", path="/v1/fine_tuning/jobs/{job_id}/resume", summary="Queue a stopped job again."),
    Operation(
        method="get", path="/v1/fine_tuning/jobs/{job_id}/events", summary="Its events, newest first.", query=_CURSORS
    ),
    Operation(
        method="get",
        path="/v1/fine_tuning/jobs/{job_id}/checkpoints",
        summary="Its checkpoints, latest first.",
        query=_CURSORS,
    ),
)


def openapi_routes() -> list[Route]:
    """The route."""
    document = build_document(OPERATIONS)

    async def show(request: Request) -> Response:
        return JSONResponse(document)

    return [Route(PATH, show, methods=["GET"])]


def build_document(operations: Iterable[Operation]) -> dict[str, Any]:
    """The document."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Gym",
            "version": version("gym-serve"),
            "description": "OpenAI's API for chats, files, models and fine-tuning on open models.",
        },
        "security": [{"key": []}],
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}, "schemas": schemas},
    }


def _operation(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {operation.answer: {}}
    if operation.streams:
        content["text/event-stream"] = {}
    answers = {"200": {"description": "Done.", "content": content}}
    if operation.path == "/readyz":
        answers["503"] = {"description": "Not ready yet.", "content": content}
    said: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in _names(operation.path)
        ]
        + [{"name": name, "in": "query", "schema": {"type": kind}} for name, kind in operation.query],
        "responses": {
            **answers,
            "default": {
                "description": "Refused, or failed.",
                "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}},
            },
        },
    }
    if operation.open:
        said["security"] = []
    if operation.body is not None:
        schema = operation.body.model_json_schema(ref_template=_REFERENCE, mode="validation")
        schemas.update(schema.pop("$defs", {}))
        schemas[operation.body.__name__] = schema
        reference = {"$ref": _REFERENCE.format(model=operation.body.__name__)}
        said["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    if operation.form is not None:
        schema = {"type": "object", "properties": operation.form, "required": [next(iter(operation.form))]}
        said["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    return said


def _names(path: str) -> list[str]:
    return [part[1:-1] for part in path.split("/") if part.startswith("{")]


_TEXT_OR_NULL = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT_OR_NULL,
                "code": _TEXT_OR_NULL,
            },
        }
    },
}
