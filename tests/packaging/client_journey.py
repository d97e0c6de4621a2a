"""Run by test_client_runtimes in an environment that holds only gym-sdk: a whole journey with a real daemon."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from gym_sdk import AsyncGym, Gym
from gym_sdk.client.errors import NotFound

ROW = '{"messages": [{"role": "user", "content": "%d"}, {"role": "assistant", "content": "b"}]}\n'


def reason_of(call: Callable[[], object]) -> str:
    try:
        call()
    except NotFound as error:
        return error.reason
    return "nothing was raised"


def main(address: str, key: str, folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(ROW % number for number in range(20)))
    spec = "name: steps-4\nmodel: {source: tiny}\ndata: {train: [{source: rows.jsonl}]}\n"
    (folder / "run.yaml").write_text(spec)
    with Gym(address, api_key=key, timeout_s=60) as gym:
        job = gym.jobs.create(folder / "run.yaml", num_gpus=0)
        events = list(job.events(follow=True))
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        done = job.wait(timeout_s=60)
        with gym.chat.stream(done.model_id, "who are you", max_tokens=20) as stream:
            assert "".join(chunk.text for chunk in stream) == "tuned"
        assert (done.adapter.download(folder / "adapter") / "adapter_config.json").is_file()
        assert reason_of(lambda: gym.jobs.get("job-nope")) == "JOB_NOT_FOUND"

    async def ask() -> str:
        async with AsyncGym(address, api_key=key, timeout_s=60) as gym:
            return (await gym.chat.create("tiny", "say:async", max_tokens=20)).text

    assert asyncio.run(ask()) == "async"
    print(f"grpcio {version('grpcio')} protobuf {version('protobuf')}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
