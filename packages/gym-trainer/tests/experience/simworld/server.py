"""The world behind the OpenAI chat API: `student` and `teacher` are two models of one endpoint.

`complete` is the whole service as a function; `python server.py '{"seed": 3}'` serves it on a free loopback port,
which it prints, one connection after the other kept alive, until its standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from simworld import student, teacher
from simworld.tasks import World


@dataclass(frozen=True)
class Service:
    """One world with its student and teacher."""

    world: World
    habits: student.Habits = field(default_factory=student.Habits)
    faults: teacher.Faults = field(default_factory=teacher.Faults)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer one body of POST /v1/chat/completions. A missing seed counts as 0."""
        messages, seed = body["messages"], int(body.get("seed") or 0)
        if body["model"] == "teacher":
            content = teacher.reply(messages, seed, self.faults)
        else:
            content = student.reply(self.world, messages, seed, self.habits)
        prompt_tokens = sum(_num_tokens(str(message["content"])) + 4 for message in messages)
        completion_tokens = _num_tokens(content)
        return {
            "id": "chatcmpl-sim",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
        }


def _num_tokens(text: str) -> int:
    return len(text.split()) * 4 // 3 + 1


async def serve(complete: Callable[[dict[str, Any]], dict[str, Any]], port: int = 0) -> asyncio.Server:
    """A small HTTP/1.1 server on loopback for POST bodies of JSON."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                body = await reader.readexactly(int(fields.get("content-length", "0")))
                answer = json.dumps(complete(json.loads(body)) if body else {"object": "list", "data": []}).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer)
                )
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    return await asyncio.start_server(connection, "127.0.0.1", port)


async def main(settings: dict[str, Any]) -> None:
    service = Service(
        World.make(settings.get("seed", 0)),
        student.Habits(**settings.get("habits", {})),
        teacher.Faults(**settings.get("faults", {})),
    )
    server = await serve(service.complete)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}))
