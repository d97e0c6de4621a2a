"""gym.v1 over HTTP/1.1 by the Connect protocol, where gRPC is blocked (https://connectrpc.com/docs/protocol).

`POST /gym.v1.Service/Method`. A unary call has the message as its body (`application/proto` or `application/json`); an
error has an HTTP status and a JSON body. A server stream has enveloped messages: one byte of flags, four of length,
the message; the last envelope (flag 2) says how it ended, in JSON.
"""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gym_serve.errors import Reason, ServiceError, as_service_error, invalid
from gym_serve.grpc.dispatch import Method
from gym_serve.http.connect_errors import connect_error
from gym_serve.http.disconnect import until_disconnect
from gym_serve.http.gateway import call_of, log_failure
from gym_serve.http.streams import GuardedStream
from gym_serve.limits import StreamLimiter

_END_OF_STREAM = 2
_COMPRESSED = 1


def connect_routes(methods: Sequence[Method], streams: StreamLimiter) -> list[Route]:
    """A route for each method of the schema."""
    return [Route(method.path, _endpoint(method, streams), methods=["POST"]) for method in methods]


def _endpoint(method: Method, streams: StreamLimiter):
    async def unary(request: Request) -> Response:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip()
        if media_type not in ("application/proto", "application/json"):
            return Response(status_code=415, headers={"accept-post": "application/proto, application/json"})
        call = call_of(request)
        message = _parse(method, await request.body(), media_type == "application/json")
        if method.is_long:
            with streams.hold(call.key):
                answer = await until_disconnect(request.receive, method.unary(message, call))
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

        async def envelopes() -> AsyncGenerator[bytes]:
            end: dict[str, object] = {}
            try:
                with streams.hold(call.key):
                    async with aclosing(method.stream(message, call)) as responses:
                        async for response in responses:
                            yield _wrap(0, _serialize(response, as_json))
            except Exception as error:  # noqa: BLE001 - a started stream says in its last envelope what went wrong
                log_failure(error, method.path)
                end["error"] = connect_error(as_service_error(error))
            yield _wrap(_END_OF_STREAM, json.dumps(end).encode())

        return GuardedStream(envelopes(), media_type=media_type)

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
