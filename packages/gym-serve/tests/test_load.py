"""Guards many clients at once: 200 streams and 50 watchers with no event lost or doubled, and flat memory."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from daemon_process import DaemonProcess
from model_folder import write_adapter_folder, write_model
from rpc_client import RpcClient
from test_daemon_robustness import run_dir
from test_rpc import connect_envelopes, create_job

from gym_sdk._proto.gym.v1 import jobs_pb2

NUM_STREAMS, NUM_WATCHERS, NUM_TOKENS, ROUNDS = 200, 50, 50, 3


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such process")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_streams_and_fifty_watchers(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    adapter = write_adapter_folder(tmp_path / "adapter", "tuned")
    environment = {"GYM_TEST_ADAPTER": str(adapter), "STAND_IN_STEP_S": "0.02"}
    settings = "[limits]\nrequests_per_minute = 100000\n"
    with DaemonProcess(tmp_path / "data", str(model), settings=settings, environment=environment) as daemon:
        daemon.wait_ready()
        assert daemon.process is not None
        pid = daemon.process.pid
        with RpcClient(daemon.grpc_address, daemon.key) as rpc:
            job = create_job(rpc, "waits")
        folder = run_dir(daemon, job.id)
        sizes: list[int] = []

        async def stream(http: httpx.AsyncClient) -> None:
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"tokens:{NUM_TOKENS}"}],
                "stream": True,
            }
            async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = [line async for line in response.aiter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            assert sum('"content":"x"' in line for line in lines) == NUM_TOKENS

        async def watch(http: httpx.AsyncClient) -> list[int]:
            request = jobs_pb2.WatchJobEventsRequest(job_id=job.id).SerializeToString()
            content = len(request).to_bytes(5, "big") + request
            headers = {"content-type": "application/connect+proto"}
            response = await http.post("/gym.v1.JobService/WatchJobEvents", content=content, headers=headers)
            *messages, (_, end) = connect_envelopes(response.content)
            assert json.loads(end) == {}
            return [
                event.sequence
                for _, data in messages
                for event in jobs_pb2.WatchJobEventsResponse.FromString(data).events
            ]

        async def run() -> None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            headers = {"authorization": f"Bearer {daemon.key}"}
            async with httpx.AsyncClient(base_url=daemon.http_url, headers=headers, limits=limits, timeout=300) as http:
                watchers = [asyncio.create_task(watch(http)) for _ in range(NUM_WATCHERS)]
                for _ in range(ROUNDS):
                    await asyncio.gather(*(stream(http) for _ in range(NUM_STREAMS)))
                    sizes.append(resident_bytes(pid))
                (folder / "go").touch()
                seen = await asyncio.gather(*watchers)
            assert all(sequences == list(range(1, len(sequences) + 1)) for sequences in seen)
            assert len({len(sequences) for sequences in seen}) == 1

        asyncio.run(run())
        assert sizes[-1] < sizes[0] * 1.2, sizes
    assert "Traceback" not in daemon.log
