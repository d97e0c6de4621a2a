"""Guards the HTTP socket: small frames leave at once."""

from __future__ import annotations

import asyncio
import socket

from gym_serve.listening import listen


def test_no_token_waits_for_an_acknowledgement_of_the_one_before() -> None:
    """With Nagle's algorithm on, the second small frame of an answer waits for the client, up to 40 ms."""

    async def option_of_a_connection() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            found.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listening = listen("127.0.0.1", 0)
        server = await asyncio.start_server(connected, sock=listening)
        async with server:
            _, writer = await asyncio.open_connection(*listening.getsockname())
            option = await found
            writer.close()
        return option

    assert asyncio.run(option_of_a_connection()) == 1
