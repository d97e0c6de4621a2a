"""Lists that come a page at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


async def all_pages(
    fetch: Callable[[str], Awaitable[tuple[Sequence[Item], str]]], limit: int | None = None
) -> AsyncIterator[Item]:
    """Each item of each page, up to `limit`. `fetch` takes a page's token and gives its items and the next token."""
    token, count = "", 0
    while limit is None or count < limit:
        items, token = await fetch(token)
        for item in items:
            if limit is not None and count >= limit:
                return
            count += 1
            yield item
        if not token:
            return
