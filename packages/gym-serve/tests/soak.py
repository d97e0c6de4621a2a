"""Many clients on one daemon for a long time, with kills at random moments when asked.

    python packages/gym-serve/tests/soak.py --minutes 10                          # 200 streams, 50 watchers
    python packages/gym-serve/tests/soak.py --minutes 60 --kills --clients 20     # the soak

Clients stream answers whose text they know. A request ends in one of four ways: `right`; `refused`, with an error in
the API's form, or `unreachable`, when nobody listens; `cut`, when the line broke and the client can tell; or `wrong`,
which must not happen: another text with a good ending, or no end at all. Watchers follow every job over whatever
breaks, and must see each event once. Kills hit the daemon (SIGKILL, then started again), the engine, and the
processes of jobs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx

sys.path.insert(0, str(Path(__file__).parent))

from daemon_process import DaemonProcess
from model_folder import write_adapter_folder, write_model

from gym_sdk.client import AsyncGym
from gym_sdk.client.errors import RemoteError
from gym_sdk.client.types import JobState

ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
ANSWER_TIMEOUT_S = 120.0
STEP_S = "0.02"
T = TypeVar("T")


@dataclass
class Findings:
    """What happened."""

    endings: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    first_token_s: list[tuple[float, float]] = field(default_factory=list)
    """(when, how long) of each answer."""
    resident_bytes: list[int] = field(default_factory=list)
    num_jobs: int = 0
    num_events_seen: int = 0
    faults: list[str] = field(default_factory=list)
    """Of jobs and their events."""

    @property
    def share_answered_or_refused(self) -> float:
        total = sum(self.endings.values())
        return (total - self.endings["wrong"]) / total if total else 0.0

    def latency_growth(self) -> float:
        """The median time to the first token in the last quarter over that in the first."""
        if len(self.first_token_s) < 8:
            return 1.0
        begin, end = self.first_token_s[0][0], self.first_token_s[-1][0]
        quarter = (end - begin) / 4
        first = [took for at, took in self.first_token_s if at < begin + quarter]
        last = [took for at, took in self.first_token_s if at > end - quarter]
        return statistics.median(last) / statistics.median(first)

    def memory_growth(self) -> float:
        """The daemon's memory at the end over that after the first fifth, when all clients had come."""
        settled = self.resident_bytes[len(self.resident_bytes) // 5 :]
        return settled[-1] / settled[0] if settled else 1.0

    def lines(self) -> list[str]:
        return [
            f"requests: {dict(self.endings)}, {100 * self.share_answered_or_refused:.3f}% not wrong",
            f"jobs: {self.num_jobs}, events seen by watchers: {self.num_events_seen}, faults: {len(self.faults)}",
            f"kills: {dict(self.kills)}",
            f"memory of the daemon: x {self.memory_growth():.2f}; time to first token: x {self.latency_growth():.2f}",
            *self.wrong[:5],
            *self.faults[:5],
        ]


class Soak:
    """One daemon and everything that is done to it."""

    def __init__(
        self, folder: Path, *, num_clients: int, num_watchers: int, seconds: float, kills: bool, seed: int = 0
    ) -> None:
        self.findings = Findings()
        self._num_clients, self._num_watchers = num_clients, num_watchers
        self._kills = kills
        self._seconds = seconds
        self._chance = random.Random(seed)
        model = write_model(folder / "tiny")
        adapter = write_adapter_folder(folder / "adapter", "tuned")
        self.daemon = DaemonProcess(
            folder / "data",
            str(model),
            settings="[limits]\nrequests_per_minute = 1000000\nmax_streams_per_key = 1024\n",
            environment={"GYM_TEST_ADAPTER": str(adapter), "STAND_IN_STEP_S": STEP_S},
            ports=(_free_port(), _free_port()),
        )

    async def run(self) -> Findings:
        await asyncio.to_thread(self.daemon.start)
        await asyncio.to_thread(self.daemon.wait_ready)
        self._end = time.monotonic() + self._seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {"authorization": f"Bearer {self.daemon.key}"}
        try:
            async with (
                httpx.AsyncClient(
                    base_url=self.daemon.http_url, headers=headers, limits=limits, timeout=ANSWER_TIMEOUT_S
                ) as http,
                AsyncGym(self.daemon.http_url, api_key=self.daemon.key, patience_s=120, timeout_s=120) as gym,
                asyncio.TaskGroup() as group,
            ):
                for number in range(self._num_clients):
                    group.create_task(self._ask_forever(http, number))
                group.create_task(self._run_jobs(gym))
                group.create_task(self._measure())
                if self._kills:
                    group.create_task(self._kill())
        finally:
            await asyncio.to_thread(self.daemon.stop)
        return self.findings

    @property
    def _goes_on(self) -> bool:
        return time.monotonic() < self._end

    async def _ask_forever(self, http: httpx.AsyncClient, number: int) -> None:
        count = 0
        while self._goes_on:
            count += 1
            ending = await self._ask(http, number, count)
            self.findings.endings[ending] += 1
            if ending != "right":
                await asyncio.sleep(0.2)

    async def _ask(self, http: httpx.AsyncClient, number: int, count: int) -> str:
        word = f"w{number}-{count}"
        body = {"model": "tiny", "messages": [{"role": "user", "content": f"say:{word}"}], "stream": True}
        began = time.monotonic()
        text, ended = "", False
        try:
            async with (
                asyncio.timeout(ANSWER_TIMEOUT_S),
                http.stream("POST", "/v1/chat/completions", json=body) as response,
            ):
                if response.status_code != 200:
                    return self._refusal(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    data = line.removeprefix("data: ")
                    if not line or data == "[DONE]":
                        ended = ended or data == "[DONE]"
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        return "refused"
                    delta = event["choices"][0]["delta"].get("content") or ""
                    if delta and not text:
                        self.findings.first_token_s.append((began, time.monotonic() - began))
                    text += delta
        except TimeoutError:
            return self._wrong(f"{word}: no end in {ANSWER_TIMEOUT_S:.0f} s")
        except httpx.ConnectError:
            return "unreachable"
        except httpx.HTTPError:
            return "cut"
        if not ended:
            return "cut"
        return "right" if text == word else self._wrong(f"{word}: got {text!r}")

    def _refusal(self, status: int, content: bytes) -> str:
        try:
            message = json.loads(content)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return self._wrong(f"status {status} without an error: {content[:100]!r}")
        return "refused" if status in (429, 503) else self._wrong(f"status {status}: {message}")

    def _wrong(self, what: str) -> str:
        self.findings.wrong.append(what)
        return "wrong"

    async def _run_jobs(self, gym: AsyncGym) -> None:
        """One job after the other until the end, each followed by all watchers; every accepted one must end well."""
        data = self.daemon.data_dir / "rows.jsonl"
        data.write_text(ROW)
        file = await gym.files.upload(data)
        while self._goes_on or not self.findings.num_jobs:
            steps = self._chance.randrange(20, 200)
            spec = {
                "name": f"steps-{steps}",
                "model": {"source": "tiny"},
                "data": {"train": [{"source": f"file:{file.id}"}]},
            }
            try:
                job = await gym.jobs.create(spec, num_gpus=0)
            except RemoteError:
                await asyncio.sleep(0.2)
                continue
            self.findings.num_jobs += 1
            seen = await asyncio.gather(*(self._watch(gym, job.id) for _ in range(self._num_watchers)))
            if any(sequences != list(range(1, len(sequences) + 1)) for sequences in seen):
                self.findings.faults.append(f"{job.id}: an event was lost or doubled")
            if len({len(sequences) for sequences in seen}) != 1:
                self.findings.faults.append(f"{job.id}: watchers saw different events")
            self.findings.num_events_seen += sum(map(len, seen))
            done = await self._patiently(lambda job=job: gym.jobs.get(job.id))
            killed = done.failure is not None and done.failure.exit_code == -9 and done.attempt == 3
            if done.state is not JobState.SUCCEEDED and not (done.state is JobState.FAILED and killed):
                self.findings.faults.append(f"{job.id} is {done.state}: {done.failure}")
            if done.state is JobState.SUCCEEDED and done.progress.step != steps:
                self.findings.faults.append(f"{job.id} made {done.progress.step} of {steps} steps")

    async def _watch(self, gym: AsyncGym, job_id: str) -> list[int]:
        job = await self._patiently(lambda: gym.jobs.get(job_id))
        return [event.sequence async for event in job.events(follow=True)]

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except RemoteError:
                await asyncio.sleep(0.2)

    async def _measure(self) -> None:
        while self._goes_on:
            await asyncio.sleep(min(2.0, self._seconds / 20))
            if not self._kills and self.daemon.process is not None:
                self.findings.resident_bytes.append(resident_bytes(self.daemon.process.pid))

    async def _kill(self) -> None:
        while self._goes_on:
            await asyncio.sleep(self._chance.uniform(0.5, 6.0))
            victim = self._chance.choice(("daemon", "engine", "job"))
            self.findings.kills[victim] += 1
            if victim == "daemon":
                await asyncio.to_thread(self.daemon.kill)
                await asyncio.to_thread(self.daemon.start)
            elif victim == "engine":
                await self._crash_engine()
            else:
                for path in self.daemon.data_dir.glob("jobs/*/runs/*/pid"):
                    try:
                        os.kill(int(path.read_text()), signal.SIGKILL)
                    except (ProcessLookupError, ValueError):
                        continue

    async def _crash_engine(self) -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "crash"}]}
        headers = {"authorization": f"Bearer {self.daemon.key}"}
        async with httpx.AsyncClient(base_url=self.daemon.http_url, headers=headers, timeout=30) as http:
            try:
                await http.post("/v1/chat/completions", json=body)
            except httpx.HTTPError:
                return


def resident_bytes(pid: int) -> int:
    """The memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such process")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="Many clients on one daemon, for a long time.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--watchers", type=int, default=50)
    parser.add_argument("--kills", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(
            Path(folder),
            num_clients=options.clients,
            num_watchers=options.watchers,
            seconds=60 * options.minutes,
            kills=options.kills,
            seed=options.seed,
        )
        findings = asyncio.run(soak.run())
    print("\n".join(findings.lines()))
    failed = findings.faults or findings.share_answered_or_refused < 0.999
    grew = not options.kills and (findings.memory_growth() > 1.2 or findings.latency_growth() > 1.5)
    return 1 if failed or grew else 0


if __name__ == "__main__":
    sys.exit(main())
