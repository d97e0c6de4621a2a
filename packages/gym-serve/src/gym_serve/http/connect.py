"""gym.v1 over HTTP/1.1 by the Connect protocol, where gRPC is blocked (https://connectrpc.com/docs/protocol).

`POST /gym.v1.Service/Method`. A unary call has the message as its body (`application/proto` or `application/json`); an
error has an HTTP status and a JSON body. A server stream has enveloped messages: one byte of flags, four of length,
the message; the last envelope (flag 2) says how it ended, in JSON.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gym_serve.errors import Reason, ServiceError, as_service_error, invalid
from gym_serve.grpc.dispatch import Method
from gym_serve.grpc.server import rich_status
from gym_serve.http.disconnect import until_disconnect
from gym_serve.http.gateway import call_of, log_failure
from gym_serve.limits import StreamLimiter

_END_OF_STREAM = 2
_COMPRESSED = 1
_CODES = {
    "INVALID_ARGUMENT": (400, "invalid_argument"),
    "UNAUTHENTICATED": (401, "unauthenticated"),
    "PERMISSION_DENIED": (403, "permission_denied"),
    "NOT_FOUND": (404, "not_found"),
    "ALREADY_EXISTS": (409, "already_exists"),
    "RESOURCE_EXHAUSTED": (429, "resource_exhausted"),
    "FAILED_PRECONDITION": (400, "failed_precondition"),
    "OUT_OF_RANGE": (400, "out_of_range"),
    "DATA_LOSS": (500, "data_loss"),
    "UNAVAILABLE": (503, "unavailable"),
    "INTERNAL": (500, "internal"),
    "DEADLINE_EXCEEDED": (504, "deadline_exceeded"),
}
"""HTTP status and code of Connect, by the gRPC code."""


def connect_routes(methods: Sequence[Method], streams: StreamLimiter) -> list[Route]:
    """A route for each method of the schema."""
    return [Route(method.path, _endpoint(method, streams), methods=["POST"]) for method in methods]


def connect_error(error: ServiceError) -> dict[str, object]:
    """The body of an error, and the error of an ended stream."""
    status = rich_status(error)
    return {
        "code": _CODES[error.reason.terms.grpc_code][1],
        "message": error.message,
        "details": [
            {
                "type": detail.type_url.rpartition("/")[2],
                "value": base64.b64encode(detail.value).rstrip(b"=").decode(),
            }
            for detail in status.details
        ],
    }


def connect_error_response(error: ServiceError) -> JSONResponse:
    """An error of a unary call."""
    return JSONResponse(connect_error(error), status_code=_CODES[error.reason.terms.grpc_code][0])


def _endpoint(method: Method, streams: StreamLimiter):
    async def unary(request: Request) -> Response:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip()
        if media_type not in ("application/proto", "application/json"):
            return Response(status_code=415, headers={"accept-post": "application/proto, application/json"})
        call = call_of(request)
        message = _parse(method, await request.body(), media_type == "application/json")
        if method.is_long:
            with streams.hold(call.key):
                answer = await until_disconnect(request, method.unary(message, call))
        else:
            answer = await method.unary(message, call)
        return Response(_serialize(answer, media_type == "application/json"), media_type=media_type)

    async def stream(request: Request) -> Response:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip()
        if media_type not in ("application/connect+proto", "application/connect+json"):
            return Response(
                status_code=415, headers={"accept-post": "application/connect+proto, application/connect+json"}
            )
        as_json = media_type == "application/connect+json"
        call = call_of(request)
        message = _parse(method, _unwrap(await request.body()), as_json)

        async def envelopes() -> AsyncIterator[bytes]:
            end: dict[str, object] = {}
            try:
                with streams.hold(call.key):
                    async with aclosing(method.stream(message, call)) as responses:
                        async for response in responses:
                            yield _wrap(0, _serialize(response, as_json))
            except Exception as error:
                log_failure(error, method.path)
                end["error"] = connect_error(as_service_error(error))
            yield _wrap(_END_OF_STREAM, json.dumps(end).encode())

        return StreamingResponse(envelopes(), media_type=media_type)

    async def endpoint(request: Request) -> Response:
        request.scope["gym.connect"] = True
        return await (stream if method.streams else unary)(request)

    return endpoint


def _parse(method: Method, body: bytes, as_json: bool) -> Message:
    try:
        if as_json:
            return json_format.Parse(body or b"{}", method.request_type(), ignore_unknown_fields=True)
        return method.request_type.FromString(body)
    except (DecodeError, json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is no {method.request_type.DESCRIPTOR.full_name}: {error}") from None


def _serialize(message: Message, as_json: bool) -> bytes:
    return json_format.MessageToJson(message, indent=None).encode() if as_json else message.SerializeToString()


def _wrap(flags: int, data: bytes) -> bytes:
    return struct.pack(">BI", flags, len(data)) + data


def _unwrap(body: bytes) -> bytes:
    if len(body) < 5:
        raise invalid("the body is no enveloped message")
    flags, length = struct.unpack(">BI", body[:5])
    if flags & _COMPRESSED:
        raise ServiceError(Reason.REQUEST_INVALID, "compressed messages are not taken")
    if len(body) != 5 + length:
        raise invalid(f"the envelope says {length} bytes, and {len(body) - 5} came")
    return body[5:]
