"""A simulated world behind a real socket, as a process of its own, for the tests that go over the network."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from simworld.tasks import World

from gym_sdk.rundir import RunDir
from gym_sdk.spec import RunSpec
from gym_trainer.experience.run import Network, train_experience

HERE = Path(__file__).parent
WORLD = World.make(3)


class Served(NamedTuple):
    """A server that is up."""

    url: str
    asked: Callable[[], list[dict[str, Any]]]
    """The requests so far."""

    heard: Callable[[], str]
    """The next line that it prints; waits for it."""


@contextmanager
def served(tmp_path: Path, **settings: Any) -> Iterator[Served]:
    """A server process."""
    log = tmp_path / f"log-{len(list(tmp_path.glob('log-*')))}.jsonl"
    process = subprocess.Popen(
        [sys.executable, str(HERE / "faulty_server.py"), json.dumps({"seed": WORLD.seed, "log": str(log), **settings})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stdout = process.stdout
    assert stdout is not None
    assert process.stdin is not None
    try:
        port = int(stdout.readline())
        yield Served(
            f"http://127.0.0.1:{port}/v1",
            lambda: [json.loads(line) for line in log.read_text().splitlines()],
            lambda: stdout.readline().strip(),
        )
    finally:
        process.stdin.close()
        stdout.close()
        process.terminate()
        process.wait()


async def no_wait(seconds: float) -> None:
    """Backoff without waiting: the order of attempts is what is tested."""
    await asyncio.sleep(0)


def train(spec: RunSpec, **options: Any) -> tuple[dict[str, Any], RunDir]:
    run = RunDir.create(spec.output.dir, spec.name)
    return train_experience(spec, run, network=Network(sleep=no_wait), **options), run
