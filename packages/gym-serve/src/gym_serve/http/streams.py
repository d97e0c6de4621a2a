"""Streamed responses that clean up after themselves, whenever their client leaves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Proxies must pass the pieces on as they come."""


class GuardedStream(StreamingResponse):
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
        super().__init__(body, media_type=media_type, headers=headers)
        self._body = body
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the body."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._body.aclose()
            if self._stack is not None:
                await self._stack.aclose()
