"""Wakes the readers of something that has changed."""

from __future__ import annotations

import asyncio


class Changes:
    """Take a ticket, look, then wait on the ticket: a change between the look and the wait is not missed.

    One future a name serves every waiter, so that a change costs the same under one reader and under fifty.
    """

    def __init__(self) -> None:
        self._tickets: dict[str, asyncio.Future[None]] = {}

    def ticket(self, name: str) -> asyncio.Future[None]:
        """A future that is done at the next change of `name`."""
        ticket = self._tickets.get(name)
        if ticket is None:
            ticket = self._tickets[name] = asyncio.get_running_loop().create_future()
        return ticket

    def notify(self, name: str) -> None:
        """`name` has changed."""
        ticket = self._tickets.pop(name, None)
        if ticket is not None and not ticket.done():
            ticket.set_result(None)

    @staticmethod
    async def wait(ticket: asyncio.Future[None], timeout_s: float) -> bool:
        """Returns at the change, or after the timeout, and then True."""
        # `wait` leaves the future alone when one waiter gives up: it is the others' too.
        done, _ = await asyncio.wait({ticket}, timeout=timeout_s)
        return not done
