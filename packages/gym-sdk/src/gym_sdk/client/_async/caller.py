"""Calls with a total deadline, repeated only where that is safe; streams that go on from their cursor."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TypeVar

from google.protobuf.message import Message

from gym_sdk.client._async._primitives import sleep
from gym_sdk.client._async.transport import AsyncTransport
from gym_sdk.client._call import CallHeaders, client_name
from gym_sdk.client._retry import SAFE, Backoff, Repeat, may_repeat
from gym_sdk.client.errors import RemoteError

Response = TypeVar("Response", bound=Message)


class AsyncCaller:
    """Makes calls for the resources of one client."""

    def __init__(
        self,
        transport: AsyncTransport,
        api_key: str,
        *,
        timeout_s: float | None,
        connect_timeout_s: float,
        patience_s: float | None,
    ) -> None:
        self._transport = transport
        self._api_key = api_key
        self._client = client_name()
        self.timeout_s = timeout_s
        """Of a call that has no deadline of its own, over all attempts."""
        self.connect_timeout_s = connect_timeout_s
        """How long one call tries a daemon that does not answer at all."""
        self.patience_s = patience_s
        """How long a stream that broke off is opened again before giving up; None for ever."""

    def headers(self) -> CallHeaders:
        """The metadata of a new call."""
        return CallHeaders(self._api_key, self._client)

    async def unary(
        self,
        method: str,
        request: Message,
        response_type: type[Response],
        *,
        repeat: Repeat = SAFE,
        timeout_s: float | None = None,
    ) -> Response:
        """Call a method until it answers, the deadline is over, or it may not be repeated. Raises RemoteError."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        start_s = time.monotonic()
        end_s = None if timeout_s is None else start_s + timeout_s
        backoff, headers = Backoff(), self.headers()
        while True:
            left_s = None if end_s is None else max(0.001, end_s - time.monotonic())
            try:
                return await self._transport.unary(method, request, response_type, headers, left_s)
            except RemoteError as error:
                if not may_repeat(error, repeat):
                    raise
                delay_s = backoff.next_delay_s(error)
                next_s = time.monotonic() + delay_s
                unanswered = not error.reason and next_s - start_s > self.connect_timeout_s
                if unanswered or (end_s is not None and next_s >= end_s):
                    raise
                await sleep(delay_s)

    async def stream(
        self, method: str, request: Message, response_type: type[Response], *, timeout_s: float | None = None
    ) -> AsyncIterator[Response]:
        """The messages of one stream, not repeated. Closing the iterator ends the call. Raises RemoteError."""
        messages = self._transport.stream(method, request, response_type, self.headers(), timeout_s)
        try:
            async for message in messages:
                yield message
        finally:
            await messages.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    async def close(self) -> None:
        """Give the connection up."""
        await self._transport.close()
