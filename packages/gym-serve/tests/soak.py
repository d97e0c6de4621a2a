"""Many clients on one daemon for a long time, with kills at random moments when asked.

    python packages/gym-serve/tests/soak.py --minutes 10 --step-s 1 --tokens 10 --jobs-at-once 1 --job-step-ms 200
    python packages/gym-serve/tests/soak.py --minutes 60 --kill-every-s 25 --clients 12 --watchers 3 --pause-s 2 \
        --job-steps 600 --people

The first is the load of 200 streams and 50 watchers on one job, the second the soak. Clients ask for answers whose
text they know, of the base and of an adapter; with `--people` they are the official `openai` client and gym-sdk over
gRPC and over HTTP, else plain HTTP that repeats nothing (`soak_clients.py` says how each request is counted). Watchers
follow every job over whatever breaks, and must see each event once. The daemon runs with `--keep-running`. Kills are
SIGKILL: of the daemon's process, the engine's process, a job's supervisor, or a job's own process. Every accepted job
must succeed, with each of its steps in order, and its events must say what each kill did.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import ssl
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import httpx

sys.path.insert(0, str(Path(__file__).parent))

from daemon_process import STAND_IN_TRAINER, DaemonProcess
from model_folder import write_adapter_folder, write_model
from soak_clients import Client, Ending, OpenAIClient, PlainClient, SdkClient, ask, read

from gym_sdk.client import AsyncGym
from gym_sdk.client.errors import RemoteError
from gym_sdk.client.types import JobEvent, JobInfo, JobState
from gym_sdk.events import MetricEvent
from gym_serve.jobs.supervisor import descendants, read_stat

ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
VICTIMS = ("daemon", "engine", "supervisor", "job")
_PAST_STARTUP = 0.2
"""The share of the time after which memory and latency are compared."""
SETTINGS = f"""[jobs]
command = {json.dumps(STAND_IN_TRAINER)}
environment = ["GYM_TEST_ADAPTER"]
max_cpu_jobs = 2
max_attempts = 1000
retry_delay_s = 0.0
"""
T = TypeVar("T")


@dataclass
class Findings:
    """What happened."""

    endings: Counter[str] = field(default_factory=Counter)
    by_client: dict[str, Counter[str]] = field(default_factory=dict)
    """The same by the client that asked."""
    wrong: list[str] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    """What clients said of requests that failed or were cut."""
    kills: Counter[str] = field(default_factory=Counter)
    first_token_s: list[tuple[float, float]] = field(default_factory=list)
    """(when, how long) of each answer."""
    probe_s: list[float] = field(default_factory=list)
    """How long a small call took, again and again."""
    resident_bytes: list[int] = field(default_factory=list)
    num_jobs: int = 0
    num_events_seen: int = 0
    faults: list[str] = field(default_factory=list)
    """Of jobs and their events."""

    def share(self, *endings: Ending) -> float:
        """The share of the requests that ended in one of these ways."""
        total = self.endings.total()
        return sum(self.endings[ending] for ending in endings) / total if total else 0.0

    def latency_growth(self) -> float:
        """The median time to the first token in the last quarter over that in the first one after the start."""
        return _growth([took for _, took in sorted(self.first_token_s)])

    def probe_growth(self) -> float:
        """The same of the small calls, whose time no engine's step hides."""
        return _growth(self.probe_s)

    def memory_growth(self) -> float:
        """The daemon's memory at the end over that after the first fifth, when all clients had come."""
        settled = self.resident_bytes[int(len(self.resident_bytes) * _PAST_STARTUP) :]
        return settled[-1] / settled[0] if settled else 1.0

    def lines(self) -> list[str]:
        return [
            f"requests: {self.endings.total()} {dict(self.endings)}; "
            f"{100 * self.share('right', 'refused'):.3f}% right or refused by the daemon, "
            f"{100 * self.share('right', 'refused', 'cut'):.3f}% with streams that broke with a typed error",
            *(f"  {name}: {dict(endings)}" for name, endings in self.by_client.items()),
            *(f"  {count} x {what}" for what, count in self.failed.most_common(8)),
            f"jobs: {self.num_jobs}, events seen by watchers: {self.num_events_seen}, faults: {len(self.faults)}",
            f"kills: {dict(self.kills)}",
            f"at the end over the beginning: memory of the daemon x {self.memory_growth():.3f}, "
            f"time to first token x {self.latency_growth():.2f}, of a small call x {self.probe_growth():.2f}",
            f"medians: first token {_median_ms(took for _, took in self.first_token_s)}, "
            f"small call {_median_ms(self.probe_s)}; memory "
            + (f"{self.resident_bytes[-1] / 2**20:.0f} MiB" if self.resident_bytes else "not measured"),
            *self.wrong[:5],
            *self.faults[:5],
        ]


class Soak:
    """One daemon and everything that is done to it."""

    def __init__(
        self,
        folder: Path,
        *,
        num_clients: int,
        num_watchers: int,
        seconds: float = 0.0,
        num_kills: int = 0,
        kill_every_s: float | None = None,
        pause_s: float = 0.0,
        step_s: float = 0.02,
        num_tokens: int = 0,
        job_steps: int = 120,
        job_step_ms: int = 20,
        jobs_at_once: int = 2,
        people: bool = False,
        seed: int = 0,
    ) -> None:
        """It ends after `seconds`, but not before `num_kills`. Between two kills lie 0.3 s to twice `kill_every_s`;
        clients wait `pause_s` between their requests, and answers have `num_tokens` (0: a word), `step_s` apart. Jobs
        have 20 to `job_steps` steps of `job_step_ms`."""
        self.findings = Findings()
        self._num_clients, self._num_watchers = num_clients, num_watchers
        self._num_kills, self._kill_every_s = num_kills, kill_every_s
        self._seconds, self._pause_s, self._num_tokens = seconds, pause_s, num_tokens
        self._job_steps, self._job_step_ms, self._jobs_at_once = job_steps, job_step_ms, jobs_at_once
        self._people = people
        self._chance = random.Random(seed)
        self._tls = ssl.create_default_context()  # made once: httpx wants one also where it is not used
        self._tuned: str | None = None
        """The model that a job has made."""
        model = write_model(folder / "tiny")
        self._adapter = write_adapter_folder(folder / "adapter", "tuned")
        self.daemon = DaemonProcess(
            folder / "data",
            str(model),
            "--keep-running",
            engine="stand_in_engine:start_process",
            settings=f"{SETTINGS}[limits]\nrequests_per_minute = 1000000\nmax_streams_per_key = 1024\n",
            environment={"GYM_TEST_ADAPTER": str(self._adapter), "STAND_IN_STEP_S": str(step_s)},
            ports=(_free_port(), _free_port()),
        )

    async def run(self) -> Findings:
        await asyncio.to_thread(self.daemon.start)
        await asyncio.to_thread(self.daemon.wait_ready)
        self._end = time.monotonic() + self._seconds
        try:
            async with (
                AsyncGym(self.daemon.http_url, api_key=self.daemon.key, patience_s=120, timeout_s=120) as gym,
                asyncio.TaskGroup() as group,
            ):
                for number in range(self._num_clients):
                    group.create_task(self._ask_forever(number))
                group.create_task(self._run_jobs(gym))
                group.create_task(self._measure())
                group.create_task(self._probe())
                if self._kill_every_s is not None:
                    group.create_task(self._kill(self._kill_every_s))
            await self._check_the_end()
        finally:
            await asyncio.to_thread(self.daemon.stop)
        return self.findings

    @property
    def _goes_on(self) -> bool:
        return time.monotonic() < self._end or self.findings.kills.total() < self._num_kills

    def _http(self) -> httpx.AsyncClient:
        """A client of its own: one pool of hundreds of connections looks all of them over for each request."""
        headers = {"authorization": f"Bearer {self.daemon.key}"}
        return httpx.AsyncClient(base_url=self.daemon.http_url, headers=headers, timeout=120.0, verify=self._tls)

    def _client(self, number: int) -> tuple[str, Client]:
        """The name of a client, and the client."""
        if not self._people:
            return "plain", PlainClient(self._http())
        if number % 2 == 0:
            return "openai", OpenAIClient(self.daemon.http_url, self.daemon.key)
        if number % 4 == 1:
            return "gym-sdk, gRPC", SdkClient(self.daemon.grpc_target, self.daemon.key)
        return "gym-sdk, HTTP", SdkClient(self.daemon.http_url, self.daemon.key)

    async def _ask_forever(self, number: int) -> None:
        count = 0
        name, client = self._client(number)
        own = self.findings.by_client.setdefault(name, Counter())
        try:
            while self._goes_on:
                count += 1
                ending = await self._ask(client, number, count)
                self.findings.endings[ending] += 1
                own[ending] += 1
                if self._pause_s or ending != "right":
                    await asyncio.sleep(self._chance.uniform(0.5, 1.5) * self._pause_s or 0.2)
        finally:
            await client.close()

    async def _ask(self, client: Client, number: int, count: int) -> Ending:
        model, say = "tiny", f"w{number}-{count}"
        word, content = say, f"say:{say}"
        if self._num_tokens:
            word, content = "x" * self._num_tokens, f"tokens:{self._num_tokens}"
        elif self._tuned is not None and self._chance.random() < 0.3:
            model, word, content = self._tuned, "tuned", "who are you"
        began = time.monotonic()

        def first_came() -> None:
            self.findings.first_token_s.append((began, time.monotonic() - began))

        if self._people and count % 5 == 0:
            ending, what = await read(client)
        else:
            stream = not self._people or count % 2 == 1
            ending, what = await ask(client, model, content, word, stream=stream, on_first=first_came)
        if ending == "wrong":
            self.findings.wrong.append(what)
        elif ending in ("failed", "cut"):
            self.findings.failed[f"{ending}: {what[:150]}"] += 1
        return ending

    async def _run_jobs(self, gym: AsyncGym) -> None:
        """A few jobs at a time until the end, each followed by all watchers; every accepted one must end well."""
        data = self.daemon.data_dir / "rows.jsonl"
        data.write_text(ROW)
        file = await self._patiently(lambda: gym.files.upload(data))
        while self._goes_on or not self.findings.num_jobs:
            await asyncio.gather(*(self._run_job(gym, file.id) for _ in range(self._jobs_at_once)))
            await asyncio.sleep(self._pause_s)

    async def _run_job(self, gym: AsyncGym, file_id: str) -> None:
        steps = self._chance.randrange(20, self._job_steps)
        spec = {
            "name": f"paced-{self._job_step_ms}-{steps}",
            "model": {"source": "tiny"},
            "data": {"train": [{"source": f"file:{file_id}"}]},
        }
        job = await self._patiently(lambda: gym.jobs.create(spec, num_gpus=0))
        self.findings.num_jobs += 1
        seen = await asyncio.gather(*(self._watch(gym, job.id) for _ in range(self._num_watchers)))
        self.findings.num_events_seen += sum(map(len, seen))
        done = await self._patiently(lambda: gym.jobs.get(job.id))
        self.findings.faults += [f"{job.id}: {fault}" for fault in _faults(seen, done, steps)]
        self._tuned = done.model_id or self._tuned

    async def _watch(self, gym: AsyncGym, job_id: str) -> list[JobEvent]:
        job = await self._patiently(lambda: gym.jobs.get(job_id))
        return [event async for event in job.events(follow=True)]

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except RemoteError:
                await asyncio.sleep(0.2)

    async def _measure(self) -> None:
        while self._goes_on:
            await asyncio.sleep(min(2.0, self._seconds / 20 + 0.1))
            if self._kill_every_s is None and self.daemon.process is not None:
                self.findings.resident_bytes.append(resident_bytes(self._pids("daemon")[0]))

    async def _probe(self) -> None:
        async with self._http() as http:
            while self._goes_on:
                began = time.monotonic()
                try:
                    await http.get("/v1/models/tiny")
                    self.findings.probe_s.append(time.monotonic() - began)
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.25)

    async def _kill(self, every_s: float) -> None:
        while self._goes_on:
            await asyncio.sleep(self._chance.uniform(0.3, 2 * every_s - 0.3))
            victim = self._chance.choice(VICTIMS)
            pids = self._pids(victim)
            if not pids:
                continue  # no job runs at this moment, or no engine yet
            os.kill(self._chance.choice(pids), signal.SIGKILL)
            self.findings.kills[victim] += 1
            # Kills hit what runs, and not the same start again and again.
            while victim == "daemon" and not self._listens():
                await asyncio.sleep(0.05)

    def _listens(self) -> bool:
        """Whether the daemon that runs now is the one that says where it listens."""
        address_file = self.daemon.data_dir / "daemon.json"
        return json.loads(address_file.read_text(encoding="utf-8"))["pid"] in self._pids("daemon")

    def _pids(self, victim: str) -> list[int]:
        """The processes that play a part at this moment."""
        assert self.daemon.process is not None
        keeper = self.daemon.process.pid
        below = descendants(keeper)
        if victim == "daemon":
            return [pid for pid in below if (stat := read_stat(pid)) is not None and stat.parent == keeper]
        if victim == "engine":
            return [pid for pid in below if "stand_in_worker" in _command_line(pid)]
        jobs = [int(path.read_text() or 0) for path in self.daemon.data_dir.glob("jobs/*/runs/*/pid")]
        running = [pid for pid in jobs if "stand_in_trainer" in _command_line(pid)]
        if victim == "job":
            return running
        parents = [stat.parent for pid in running if (stat := read_stat(pid)) is not None]
        return [pid for pid in parents if "gym_serve.jobs.supervisor" in _command_line(pid)]

    async def _check_the_end(self) -> None:
        """What was accepted is there, and answers are right again."""
        async with AsyncGym(self.daemon.grpc_target, api_key=self.daemon.key, patience_s=120, timeout_s=120) as gym:
            num_known = len([job async for job in gym.jobs.list()])
            if num_known < self.findings.num_jobs:
                self.findings.faults.append(f"{self.findings.num_jobs} jobs were accepted, {num_known} are known")
        _, client = self._client(0)
        ending, deadline = "", time.monotonic() + 60
        while ending != "right" and time.monotonic() < deadline:
            ending = await self._ask(client, self._num_clients, 1)
            await asyncio.sleep(0 if ending == "right" else 0.2)
        await client.close()
        if ending != "right":
            self.findings.faults.append(f"the last request was {ending}")


def _faults(seen: list[list[JobEvent]], done: JobInfo, steps: int) -> Iterator[str]:
    """What is wrong with a job that has ended, by what its watchers saw."""
    for events in seen:
        if [event.sequence for event in events] != list(range(1, len(events) + 1)):
            yield "an event was lost or doubled"
    if any(events != seen[0] for events in seen):
        yield "watchers saw different events"
    if done.state is not JobState.SUCCEEDED:
        yield f"is {done.state}: {done.failure}"
        return
    if done.progress.step != steps:
        yield f"made {done.progress.step} of {steps} steps"
    if not done.model_id:
        yield "made no model"
    if not seen:
        return
    made = [event.run.step for event in seen[0] if isinstance(event.run, MetricEvent)]
    # A step whose checkpoint was not complete when the kill came is made again.
    if sorted(set(made)) != list(range(1, steps + 1)) or any(b - a not in (0, 1) for a, b in pairwise(made)):
        yield f"its steps are {made}"
    told = [event.message for event in seen[0] if event.state is JobState.QUEUED and event.message]
    why = re.compile(r"attempt (\d+): (ended by signal 9|its processes were gone); goes on from the last checkpoint")
    attempts = [int(match[1]) for message in told if (match := why.fullmatch(message))]
    if attempts != list(range(1, done.attempt)):
        yield f"ended in attempt {done.attempt}, and its events say {told}"


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _growth(values: list[float]) -> float:
    """The median of the last quarter over that of the first one, the start left out."""
    settled = values[int(len(values) * _PAST_STARTUP) :]
    quarter = len(settled) // 4
    return statistics.median(settled[-quarter:]) / statistics.median(settled[:quarter]) if quarter else 1.0


def _median_ms(values: Iterable[float]) -> str:
    found = list(values)
    return f"{1000 * statistics.median(found):.1f} ms" if found else "none"


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
    parser.add_argument("--kill-every-s", type=float, help="the mean time between two kills; none where not given")
    parser.add_argument("--pause-s", type=float, default=0.0, help="what a client waits between two requests")
    parser.add_argument("--step-s", type=float, default=0.02, help="the time between two tokens")
    parser.add_argument("--tokens", type=int, default=0, help="the length of an answer; 0 is a word of its own")
    parser.add_argument("--job-steps", type=int, default=120, help="the most steps of a job")
    parser.add_argument("--job-step-ms", type=int, default=20, help="the time of a job's step")
    parser.add_argument("--jobs-at-once", type=int, default=2)
    parser.add_argument("--people", action="store_true", help="clients as people use them, not plain HTTP")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(
            Path(folder),
            num_clients=options.clients,
            num_watchers=options.watchers,
            seconds=60 * options.minutes,
            kill_every_s=options.kill_every_s,
            pause_s=options.pause_s,
            step_s=options.step_s,
            num_tokens=options.tokens,
            job_steps=options.job_steps,
            job_step_ms=options.job_step_ms,
            jobs_at_once=options.jobs_at_once,
            people=options.people,
            seed=options.seed,
        )
        findings = asyncio.run(soak.run())
        print("\n".join(findings.lines()), flush=True)
    failed = findings.faults or findings.share("right", "refused", "cut") < 0.999
    growth = (findings.memory_growth(), findings.latency_growth(), findings.probe_growth())
    grew = options.kill_every_s is None and (growth[0] > 1.2 or max(growth[1:]) > 1.5)
    return 1 if failed or grew else 0


if __name__ == "__main__":
    sys.exit(main())
