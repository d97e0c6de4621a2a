"""Streamed responses that clean up after themselves, whenever their client leaves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, suppress

from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gym_serve.http.disconnect import until_disconnect

SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Proxies must pass the pieces on as they come."""


class GuardedStream(Response):
    """A streamed body that is closed at once when its client is gone, and a stack that is closed even if the body was
    never begun. (A generator that is only dropped is closed whenever the collector comes by.)"""

    def __init__(
        self,
        body: AsyncGenerator[bytes],
        *,
        media_type: str,
        headers: Mapping[str, str] | None = None,
        stack: AsyncExitStack | None = None,
    ) -> None:
        # Not `super().__init__`, which would render a body. Starlette's own stream starts an anyio task group for each
        # answer; two tasks do the same for less.
        self._pieces = body
        self._stack = stack
        self.status_code = 200
        self.media_type = media_type
        self.background: BackgroundTask | None = None
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the body."""
        try:
            with suppress(ClientDisconnect):
                await until_disconnect(receive, self._send(send))
        finally:
            await self._pieces.aclose()
            if self._stack is not None:
                await self._stack.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
