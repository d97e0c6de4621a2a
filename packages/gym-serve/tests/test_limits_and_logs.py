"""Guards what one key may ask for at once, over both interfaces together, and what the log says of each call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest
from daemon_process import DaemonProcess
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from model_folder import write_model
from rpc_client import RpcClient, details
from test_daemon_robustness import until
from test_rpc import chat, create_job

from gym_sdk._proto.gym.v1 import inference_pb2, jobs_pb2, models_pb2, server_pb2

SETTINGS = """[server]
trusted_proxies = ["127.0.0.1"]
[limits]
requests_per_minute = 300
max_streams_per_key = 2
max_request_bytes = 5242880
[log]
format = "json"
"""
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("limits")
    with DaemonProcess(folder / "data", str(write_model(folder / "tiny")), settings=SETTINGS) as process:
        yield process.wait_ready()


def make_key(daemon: DaemonProcess, name: str) -> str:
    """A user's key of its own, so that no test spends another's calls."""
    with RpcClient(daemon.grpc_address, daemon.key) as rpc:
        request = server_pb2.CreateKeyRequest(name=name, scope=server_pb2.KEY_SCOPE_USER)
        return rpc.call("KeyService", "CreateKey", request).secret


def body(content: str, **options: object) -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **options}


def lines(daemon: DaemonProcess) -> list[dict[str, object]]:
    return [json.loads(line) for line in daemon.log.splitlines()]


def test_a_key_that_calls_too_often_is_told_when_to_come_back(daemon: DaemonProcess) -> None:
    """300 a minute: 30 at once, then 5 a second, whichever way they come."""
    key = make_key(daemon, "often")
    with daemon.http(key) as http, RpcClient(daemon.grpc_address, key) as rpc:
        answers = [http.get("/v1/models") for _ in range(60)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert [answer.status_code for answer in answers[:25]] == [200] * 25
        assert refused
        assert refused[0].json()["error"]["message"].startswith("this key may make 300 calls a minute")
        assert 0 < int(refused[0].headers["retry-after-ms"]) <= 200
        with pytest.raises(grpc.RpcError) as told:
            list(map(partial(rpc.call, "ModelService", "ListModels"), [models_pb2.ListModelsRequest()] * 60))
        assert details(told.value)[0:2][1].reason == "RATE_LIMITED"
        status = rpc_status.from_call(told.value)  # type: ignore[arg-type]
        assert any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details)
        assert httpx.get(f"{daemon.http_url}/healthz").status_code == 200
        with daemon.http(make_key(daemon, "seldom")) as other:
            assert other.get("/v1/models").status_code == 200, "another key has calls of its own"


def test_a_key_has_so_many_streams_over_both_interfaces_together(daemon: DaemonProcess) -> None:
    key = make_key(daemon, "streams")
    with daemon.http(key) as http, RpcClient(daemon.grpc_address, key) as rpc, ExitStack() as first:
        held = first.enter_context(http.stream("POST", CHAT, json=body("hang", stream=True)))
        frames = held.iter_lines()  # kept: httpx hangs up when it is dropped
        next(frames)
        request = inference_pb2.StreamChatCompletionRequest(input=chat("hang"))
        second = rpc.stream("InferenceService", "StreamChatCompletion", request)
        next(second)
        refused = http.post(CHAT, json=body("say:hi"))
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        assert "2 requests open, of 2 that it may have" in refused.json()["error"]["message"]
        with pytest.raises(grpc.RpcError) as told:
            list(rpc.stream("InferenceService", "StreamChatCompletion", request))
        assert details(told.value)[0:2][0] == "RESOURCE_EXHAUSTED"
        first.close()
        until(lambda: http.post(CHAT, json=body("say:hi")).status_code == 200, "the place of the first stream")
        second.cancel()


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_refused(daemon: DaemonProcess, announced: bool) -> None:
    content = json.dumps(body("x" * 6_000_000)).encode()

    def pieces() -> Iterator[bytes]:
        yield content[:3_000_000]
        yield content[3_000_000:]

    with daemon.http(make_key(daemon, f"large-{announced}")) as http:
        refused = http.post(CHAT, content=content if announced else pieces())
        assert (refused.status_code, "larger than 5242880 bytes" in refused.text) == (413, True)
        assert http.post(CHAT, json=body("say:hi")).status_code == 200


def test_a_message_that_is_too_large_is_refused(daemon: DaemonProcess) -> None:
    with RpcClient(daemon.grpc_address, make_key(daemon, "large message")) as rpc:
        request = inference_pb2.CreateChatCompletionRequest(input=chat("x" * 6_000_000))
        with pytest.raises(grpc.RpcError) as told:
            rpc.call("InferenceService", "CreateChatCompletion", request)
        assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]


def test_a_deadline_over_grpc_ends_the_generation(daemon: DaemonProcess) -> None:
    def running() -> int:
        with daemon.http() as http:
            page = http.get("/metrics").text.splitlines()
        return int(float(next(line for line in page if line.startswith("gym_engine_running ")).split()[1]))

    with RpcClient(daemon.grpc_address, make_key(daemon, "deadline")) as rpc:
        request = inference_pb2.CreateChatCompletionRequest(input=chat("hang"))
        with pytest.raises(grpc.RpcError) as told:
            rpc.call("InferenceService", "CreateChatCompletion", request, timeout=0.5)
        assert told.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
    until(lambda: running() == 0, "the slot")


def test_a_call_is_found_in_the_log_by_its_id_and_no_text_is(daemon: DaemonProcess) -> None:
    with daemon.http(make_key(daemon, "logged")) as http:
        answer = http.post(CHAT, json=body("say:elephant"), headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    until(lambda: any(line["request_id"] == "mine-1" for line in lines(daemon)), "the line of the call")
    (line,) = (line for line in lines(daemon) if line["request_id"] == "mine-1")
    assert (line["logger"], line["message"], line["key"]) == ("gym_serve.access", f"POST {CHAT} 200", "logged")
    assert "elephant" not in daemon.log


FORWARDED = "192.0.2.66, 203.0.113.9"
"""What a client made up, and what the proxy saw."""


@pytest.mark.parametrize("path", ["/v1/models", "/gym.v1.JobService/GetJob"])
def test_a_trusted_proxy_says_who_was_refused(daemon: DaemonProcess, path: str) -> None:
    name = f"proxied-{len(path)}"
    headers = {"authorization": "Bearer wrong", "x-forwarded-for": FORWARDED, "x-request-id": name}
    assert httpx.post(daemon.http_url + path, headers=headers).status_code == 401
    (told,) = (line for line in lines(daemon) if line["request_id"] == name and line["logger"] == "gym_serve.audit")
    assert (told["message"], told["client"]) == ("refused: KEY_INVALID", "203.0.113.9")


def test_who_is_no_proxy_is_not_believed(shared_daemon: DaemonProcess) -> None:
    headers = {"authorization": "Bearer wrong", "x-forwarded-for": FORWARDED, "x-request-id": "unproxied"}
    assert httpx.get(f"{shared_daemon.http_url}/v1/models", headers=headers).status_code == 401
    (told,) = (line for line in shared_daemon.log.splitlines() if "[unproxied] refused" in line)
    assert told.endswith('client="127.0.0.1"')
    assert "203.0.113.9" not in shared_daemon.log


def test_what_an_admin_does_has_an_audit_line(daemon: DaemonProcess, tmp_path: Path) -> None:
    user = make_key(daemon, "owner")
    with RpcClient(daemon.grpc_address, user) as rpc:
        job_id = create_job(rpc, "waits").id
    with RpcClient(daemon.grpc_address, daemon.key) as admin:
        admin.call("KeyService", "ListKeys", server_pb2.ListKeysRequest())
        admin.call("JobService", "CancelJob", jobs_pb2.CancelJobRequest(job_id=job_id))
    with daemon.http() as http:
        http.get("/metrics")
    told = [line for line in lines(daemon) if line["logger"] == "gym_serve.audit" and line.get("by") == "local"]
    assert {"key created", "keys listed", "job of another key: cancelling", "metrics read"} <= {
        str(line["message"]) for line in told
    }
    (cancelled,) = (line for line in told if line.get("job") == job_id)
    assert str(cancelled["request_id"]).startswith("req_")
