"""A simulated world behind a real socket, with faults on purpose: `python faulty_server.py '{"seed": 1, ...}'`.

Settings: `seed`, `faults` (of the teacher), `plan` (by role, what happens to the first requests: a status, `hang`,
`garbage`, `close` or `ok`), `headers` (of failing answers), `jitter_s` (answers are held back for a random while),
`say_at` (after how many requests a line is printed), `key` (the only one accepted), `models` (what GET lists), `log`
(a file with one line a request), `log_requests` (each with the whole request). Prints its port; ends when its standard
input closes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from simworld import teacher
from simworld.server import Service
from simworld.tasks import World


class Server:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.service = Service(World.make(settings["seed"]), faults=teacher.Faults(**settings.get("faults", {})))
        self.plan = {role: list(actions) for role, actions in settings.get("plan", {}).items()}
        self.count = 0
        self.random = random.Random(settings["seed"])
        self.log = open(settings["log"], "a", encoding="utf-8") if "log" in settings else None  # noqa: SIM115

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                raw = await reader.readexactly(int(fields.get("content-length", "0")))
                if not await self.answer(head, fields, raw, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def answer(self, head: str, fields: dict[str, str], raw: bytes, writer: asyncio.StreamWriter) -> bool:
        if "key" in self.settings and fields.get("authorization") != f"bearer {self.settings['key']}":
            return await self.send(writer, 401, {"error": {"message": "Incorrect API key provided"}})
        if head.startswith("GET"):
            data = [{"id": name, "object": "model"} for name in self.settings.get("models", [])]
            return await self.send(writer, 200, {"object": "list", "data": data})
        body = json.loads(raw)
        planned = self.plan.get(body["model"], [])
        action = planned.pop(0) if planned else "ok"
        self.note(body, action)
        if action == "hang":
            await asyncio.sleep(3600)
        if action == "close":
            return False
        if action == "garbage":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n<html>ok?")
            return True
        if isinstance(action, int):
            return await self.send(writer, action, {"error": {"message": f"planned {action}"}})
        if self.settings.get("jitter_s"):
            await asyncio.sleep(self.random.uniform(0, self.settings["jitter_s"]))
        return await self.send(writer, 200, self.service.complete(body))

    async def send(self, writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> bool:
        content = json.dumps(body).encode()
        extra = self.settings.get("headers", {}) if status >= 400 else {}
        lines = "".join(f"{name}: {value}\r\n" for name, value in extra.items())
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n{lines}\r\n".encode() + content)
        await writer.drain()
        return True

    def note(self, body: dict[str, Any], action: str | int) -> None:
        if self.log is not None:
            digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
            entry = {"model": body["model"], "body": digest, "action": action}
            self.log.write(
                json.dumps({**entry, "request": body} if self.settings.get("log_requests") else entry) + "\n"
            )
            self.log.flush()
        self.count += 1
        if self.count == self.settings.get("say_at"):
            print(f"{self.count} requests", flush=True)


async def main() -> None:
    server = Server(json.loads(sys.argv[1]))
    listening = await asyncio.start_server(server.connection, "127.0.0.1", 0)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
