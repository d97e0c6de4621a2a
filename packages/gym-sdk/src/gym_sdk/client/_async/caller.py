"""Calls with a total deadline, repeated only where that is safe; streams that go on from their cursor."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TypeVar

from google.protobuf.message import Message

from gym_sdk.client._async._primitives import sleep
from gym_sdk.client._async.transport import AsyncTransport
from gym_sdk.client._call import CallHeaders, client_name
from gym_sdk.client._retry import SAFE, UNSAFE, Backoff, Repeat, may_repeat, was_not_begun
from gym_sdk.client.errors import RemoteError

Response = TypeVar("Response", bound=Message)

RESTART_S = 60.0
"""How long one call waits for a daemon that has answered before and is gone: restarts take seconds."""


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
        """How long one call tries a daemon that has never answered."""
        self.has_answered: bool = False
        """Whether a daemon was there at all: one that is gone now is thought to be on its way back."""
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
        attempts = _Attempts(self, repeat, self.timeout_s if timeout_s is None else timeout_s)
        headers = self.headers()
        while True:
            try:
                response = await self._transport.unary(method, request, response_type, headers, attempts.left_s)
            except RemoteError as error:
                await sleep(attempts.next_delay_s(error))
            else:
                self.has_answered = True
                return response

    async def stream(
        self,
        method: str,
        request: Message,
        response_type: type[Response],
        *,
        repeat: Repeat | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Response]:
        """The messages of one stream. With `repeat` it may be opened again until its first message has come.

        Closing the iterator ends the call. Raises RemoteError.
        """
        attempts, headers = _Attempts(self, repeat or UNSAFE, timeout_s), self.headers()
        while True:
            messages = self._transport.stream(method, request, response_type, headers, attempts.left_s)
            begun = False
            try:
                async for message in messages:
                    begun = self.has_answered = True
                    yield message
                return
            except RemoteError as error:
                if begun or repeat is None:
                    raise
                delay_s = attempts.next_delay_s(error)
            finally:
                await messages.aclose()  # pyright: ignore[reportAttributeAccessIssue]
            await sleep(delay_s)

    async def close(self) -> None:
        """Give the connection up."""
        await self._transport.close()


class _Attempts:
    """The attempts at one call: whether and when there is another one."""

    def __init__(self, caller: AsyncCaller, repeat: Repeat, timeout_s: float | None) -> None:
        self._repeat = repeat
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._silent_since_s: float | None = None
        self._caller = caller
        self._backoff = Backoff()
        self._num_broken = 0

    @property
    def left_s(self) -> float | None:
        """The time until the deadline."""
        return None if self._end_s is None else max(0.001, self._end_s - time.monotonic())

    def next_delay_s(self, error: RemoteError) -> float:
        """How long to wait before the next attempt. Raises the error where there is none."""
        if not may_repeat(error, self._repeat, self._num_broken):
            raise error
        self._num_broken += not was_not_begun(error)
        delay_s = self._backoff.next_delay_s(error)
        now_s = time.monotonic()
        if error.reason:
            self._silent_since_s = None
            self._caller.has_answered = True
        elif self._silent_since_s is None:
            self._silent_since_s = now_s
        silence_s = 0.0 if self._silent_since_s is None else now_s + delay_s - self._silent_since_s
        connect_timeout_s = self._caller.connect_timeout_s
        patience_s = max(connect_timeout_s, RESTART_S) if self._caller.has_answered else connect_timeout_s
        if silence_s > patience_s or (self._end_s is not None and now_s + delay_s >= self._end_s):
            raise error
        return delay_s
