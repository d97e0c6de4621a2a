"""One call to a daemon: over gRPC, or over HTTP/1.1 by the Connect protocol where gRPC is blocked."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from gym_sdk.client._call import CallHeaders, cannot_reach, connect_failure, grpc_failure
from gym_sdk.client._options import CHANNEL_OPTIONS
from gym_sdk.client.errors import TimedOut, remote_error
from gym_sdk.client.settings import Settings
from gym_sdk.errors import UserError, Where

Response = TypeVar("Response", bound=Message)

QUIET_S = 90.0
"""HTTP has no keepalive of its own: a stream that is silent for so long is opened again."""
END_OF_STREAM = 0x02
COMPRESSED = 0x01


class AsyncTransport(Protocol):
    """Sends a message to a method such as `JobService/GetJob`."""

    async def unary(
        self,
        method: str,
        request: Message,
        response_type: type[Response],
        headers: CallHeaders,
        timeout_s: float | None,
    ) -> Response:
        """One message for one. Raises RemoteError."""
        ...

    def stream(
        self,
        method: str,
        request: Message,
        response_type: type[Response],
        headers: CallHeaders,
        timeout_s: float | None,
    ) -> AsyncIterator[Response]:
        """One message for many. Closing the iterator ends the call. Raises RemoteError."""
        ...

    async def close(self) -> None:
        """Give the connection up."""
        ...


def open_transport(settings: Settings) -> AsyncTransport:
    """The transport that the address asks for. Connects when it is first used."""
    return AsyncHttpTransport(settings) if settings.is_http else AsyncGrpcTransport(settings)


def read_certificate(settings: Settings) -> bytes | None:
    """The authorities to trust; None for the system's."""
    if not settings.ca_certificate:
        return None
    try:
        return Path(settings.ca_certificate).read_bytes()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=Where(file=settings.ca_certificate)) from None


class AsyncGrpcTransport:
    """Over gRPC."""

    def __init__(self, settings: Settings) -> None:
        # Imported here: `import gym_sdk` must not pay for grpc.
        import grpc

        self._settings = settings
        self._error = grpc.RpcError
        self._credentials = grpc.ssl_channel_credentials(read_certificate(settings)) if settings.is_encrypted else None
        self._opened: Any = None

    @property
    def _channel(self) -> Any:
        # Opened by the first call: an asynchronous channel belongs to the event loop that runs then.
        if self._opened is None:
            import grpc.aio

            target = self._settings.target
            if self._credentials is not None:
                self._opened = grpc.aio.secure_channel(target, self._credentials, options=CHANNEL_OPTIONS)
            else:
                self._opened = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        return self._opened

    async def unary(
        self,
        method: str,
        request: Message,
        response_type: type[Response],
        headers: CallHeaders,
        timeout_s: float | None,
    ) -> Response:
        """One message for one."""
        call: Any = self._channel.unary_unary(
            f"/gym.v1.{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response_type.FromString,
        )
        try:
            return await call(request, timeout=timeout_s, metadata=headers.pairs())
        except self._error as error:
            raise grpc_failure(error, headers.request_id, self._settings) from None

    async def stream(
        self,
        method: str,
        request: Message,
        response_type: type[Response],
        headers: CallHeaders,
        timeout_s: float | None,
    ) -> AsyncIterator[Response]:
        """One message for many."""
        start: Any = self._channel.unary_stream(
            f"/gym.v1.{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response_type.FromString,
        )
        call = start(request, timeout=timeout_s, metadata=headers.pairs())
        try:
            async for message in call:
                yield message
        except self._error as error:
            raise grpc_failure(error, headers.request_id, self._settings) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        """Give the connection up."""
        if self._opened is not None:
            await self._opened.close()


class AsyncHttpTransport:
    """Over HTTP/1.1, by the Connect protocol (https://connectrpc.com/docs/protocol)."""

    def __init__(self, settings: Settings) -> None:
        # Imported here: most programs speak gRPC.
        import httpx

        self._settings = settings
        self._httpx = httpx
        self._unconnected = (httpx.ConnectError, httpx.ConnectTimeout)
        verify: Any = True
        if settings.ca_certificate:
            import ssl

            read_certificate(settings)
            verify = ssl.create_default_context(cafile=settings.ca_certificate)
        self._client = httpx.AsyncClient(verify=verify, timeout=httpx.Timeout(None, connect=20.0))

    async def unary(
        self,
        method: str,
        request: Message,
        response_type: type[Response],
        headers: CallHeaders,
        timeout_s: float | None,
    ) -> Response:
        """One message for one."""
        own = {"content-type": "application/proto", "connect-protocol-version": "1", **dict(headers.pairs())}
        if timeout_s is not None:
            own["connect-timeout-ms"] = str(max(1, round(timeout_s * 1000)))
        try:
            response = await self._client.post(
                f"{self._settings.http_root}/gym.v1.{method}",
                content=request.SerializeToString(),
                headers=own,
                timeout=self._httpx.Timeout(timeout_s, connect=min(20.0, timeout_s or 20.0)),
            )
        except self._unconnected as error:
            raise cannot_reach(self._settings, str(error), headers.request_id, never_sent=True) from None
        except self._httpx.TimeoutException:
            raise _timed_out(timeout_s, headers) from None
        except self._httpx.TransportError as error:
            raise cannot_reach(self._settings, str(error), headers.request_id) from None
        if response.status_code != 200:
            request_id = response.headers.get("x-request-id", headers.request_id)
            raise connect_failure(response.status_code, response.content, request_id)
        return response_type.FromString(response.content)

    async def stream(
        self,
        method: str,
        request: Message,
        response_type: type[Response],
        headers: CallHeaders,
        timeout_s: float | None,
    ) -> AsyncIterator[Response]:
        """One message for many."""
        own = {"content-type": "application/connect+proto", "connect-protocol-version": "1", **dict(headers.pairs())}
        if timeout_s is not None:
            own["connect-timeout-ms"] = str(max(1, round(timeout_s * 1000)))
        body = request.SerializeToString()
        try:
            async with self._client.stream(
                "POST",
                f"{self._settings.http_root}/gym.v1.{method}",
                content=struct.pack(">BI", 0, len(body)) + body,
                headers=own,
                timeout=self._httpx.Timeout(QUIET_S, connect=20.0),
            ) as response:
                request_id = response.headers.get("x-request-id", headers.request_id)
                if response.status_code != 200:
                    raise connect_failure(response.status_code, await response.aread(), request_id)
                buffer = bytearray()
                async for piece in response.aiter_raw():
                    buffer += piece
                    while len(buffer) >= 5:
                        flags, size = struct.unpack_from(">BI", buffer)
                        if len(buffer) < 5 + size:
                            break
                        content = bytes(buffer[5 : 5 + size])
                        del buffer[: 5 + size]
                        if flags & COMPRESSED:
                            raise remote_error("INTERNAL", "the answer is compressed, unasked", request_id=request_id)
                        if flags & END_OF_STREAM:
                            if b'"error"' in content:
                                raise _stream_failure(content, request_id)
                            return
                        yield response_type.FromString(content)
                raise cannot_reach(self._settings, "the stream broke off", request_id)
        except self._unconnected as error:
            raise cannot_reach(self._settings, str(error), headers.request_id, never_sent=True) from None
        except self._httpx.TimeoutException:
            raise cannot_reach(self._settings, "the stream fell silent", headers.request_id) from None
        except self._httpx.TransportError as error:
            raise cannot_reach(self._settings, str(error), headers.request_id) from None

    async def close(self) -> None:
        """Give the connections up."""
        await self._client.aclose()


def _stream_failure(content: bytes, request_id: str) -> Exception:
    import json

    try:
        error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        return remote_error("INTERNAL", "the end of the stream cannot be read", request_id=request_id)
    return connect_failure(200, json.dumps(error).encode(), request_id)


def _timed_out(timeout_s: float | None, headers: CallHeaders) -> TimedOut:
    return TimedOut(f"no answer within {timeout_s:g} s", code="DEADLINE_EXCEEDED", request_id=headers.request_id)
