"""Run by test_wide_runtime in an environment that holds only gym-sdk: a whole journey with one address and key."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from gym_sdk import AsyncGym, Gym
from gym_sdk.client.errors import NotFound


def reason_of(call: Callable[[], object]) -> str:
    try:
        call()
    except NotFound as error:
        return error.reason
    return "nothing was raised"


def main(address: str, key: str, folder: Path) -> None:
    (folder / "rows.jsonl").write_bytes(b'{"messages": []}\n' * 200)
    (folder / "run.yaml").write_text("model: {source: Q/q}\ndata: {train: [{source: rows.jsonl}]}\n")
    with Gym(address, api_key=key) as gym:
        job = gym.jobs.create(folder / "run.yaml")
        job.cancel()
        states = [str(event.state) for event in job.events(follow=True)]
        assert states == ["queued", "cancelled"], states
        target = gym.files.download(job.spec.data.train[0].source.removeprefix("file:"), folder / "back.jsonl")
        assert target.read_bytes() == (folder / "rows.jsonl").read_bytes()
        assert gym.chat.stream("base", "to be or not").collect().text == "to be or not"
        # Rich errors need google.rpc's messages, which must load beside this protobuf too.
        assert reason_of(lambda: gym.jobs.get("job-nope")) == "JOB_NOT_FOUND"

    async def ask() -> str:
        async with AsyncGym(address, api_key=key) as gym:
            return (await gym.chat.create("base", "async")).text

    assert asyncio.run(ask()) == "async"
    print(f"grpcio {version('grpcio')} protobuf {version('protobuf')}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
