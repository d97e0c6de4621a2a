"""Guards the vLLM engine against a stand-in that checks every body by vLLM's own protocol models."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_process import TESTS, DaemonProcess
from model_folder import VOCAB_SIZE, write_adapter_folder, write_model
from stand_in_vllm import CRASH, FAIL, HANG, ServerThread, StandInVllm, expected_answer

from gym_sdk.errors import GymError, ModelError, UserError
from gym_serve.engines.base import EngineError, GenerationRequest, RequestRefused, SamplingParams, Token
from gym_serve.engines.vllm import VllmEngine, start_vllm
from gym_serve.engines.vllm_server import AttachedServer
from gym_serve.engines.vllm_wire import read_chunk
from gym_serve.models import ResolvedModel
from gym_serve.settings import EngineSettings

WAIT_S = 30.0
COMMAND = [sys.executable, str(TESTS / "stand_in_vllm.py")]


@pytest.fixture
def server() -> Iterator[ServerThread]:
    thread = ServerThread(StandInVllm("some/model", api_key="sk-vllm"))
    yield thread
    thread.stop()


@pytest.fixture
def engine(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmEngine]:
    monkeypatch.setenv("VLLM_KEY", "sk-vllm")
    settings = EngineSettings(vllm_url=server.url + "/v1", vllm_api_key_env="VLLM_KEY")
    made = VllmEngine(AttachedServer(settings), vocab_size=VOCAB_SIZE, watch_s=0.05)
    yield made
    made.close()


def ask(prompt: list[int], **options: Any) -> GenerationRequest:
    return GenerationRequest(prompt_ids=prompt, **{"max_tokens": 8, **options})


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_every_setting_of_a_request_arrives(engine: VllmEngine, server: ServerThread) -> None:
    sampling = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={9: 2.0},
        seed=2**63 + 5,
    )
    request = ask([10, 11], sampling=sampling, stop_ids=frozenset([2, 1]), top_logprobs=2, grammar='{"type": "object"}')
    engine.submit(request).completion()
    (body,) = server.state.bodies
    assert body == {
        "model": "some/model",
        "request_id": request.id,
        "prompt": [10, 11],
        "add_special_tokens": False,
        "max_tokens": 8,
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"9": 2.0},
        "seed": 5,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
        "structured_outputs": {"json": '{"type": "object"}'},
    }


def test_tokens_come_as_the_server_said_them(engine: VllmEngine) -> None:
    done = engine.submit(ask([10, 11], sampling=SamplingParams(seed=4))).completion()
    assert done.token_ids == expected_answer([10, 11], "", 4, 8)
    done = engine.submit(ask([10], top_logprobs=2, max_tokens=1)).completion()
    (token,) = done.tokens
    assert (token.logprob, [token_id for token_id, _ in token.top]) == (-3.5, [10, 11])
    assert token.top[0][1] > token.top[1][1] > -3.5
    assert engine.submit(ask([10], top_logprobs=0, max_tokens=1)).completion().tokens[0].top == ()
    stream = engine.submit(ask([10] * 40))
    stream.completion()
    assert stream.num_cached_tokens == 32


def test_the_end_of_a_connection_is_the_end_of_its_request(engine: VllmEngine, server: ServerThread) -> None:
    stream = engine.submit(ask([HANG, 10], max_tokens=100))
    tokens = iter(stream)
    assert [next(tokens).id for _ in range(3)] == expected_answer([HANG, 10], "", None, 3)
    assert (engine.stats().num_running, server.state.num_open) == (1, 1)
    stream.abort()
    assert list(tokens) == []
    until(lambda: server.state.num_open == 0, "the server to end it")
    assert engine.stats().num_running == 0


def test_what_the_server_refuses_is_told_and_hurts_no_one_else(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match="Internal server error"):
        engine.submit(ask([FAIL])).completion()
    assert engine.is_alive
    assert len(engine.submit(ask([10])).completion().token_ids) == 8
    with pytest.raises(RequestRefused, match="grammar"):
        engine.submit(ask([10], grammar="start: nothing"))


CHUNKS: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "not of its protocol"),
    "no choice": ("{}", "not of its protocol"),
    "text for ids": (
        '{"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [0], "top_logprobs": [{"a": 0}]}}]}',
        "not of its",
    ),
    "an abort there": ('{"choices": [{"token_ids": [], "finish_reason": "abort"}]}', "ended the answer: abort"),
    "an error": ('{"error": {"message": "no memory"}}', "no memory"),
}


@pytest.mark.parametrize(("data", "words"), CHUNKS.values(), ids=CHUNKS.keys())
def test_a_broken_event_is_an_engine_error(data: str, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        read_chunk(data, 1)
    assert read_chunk('{"choices": [], "usage": {}}', None).tokens == []
    assert read_chunk('{"choices": [{"token_ids": [7]}]}', None).tokens == [Token(7)]


def test_adapters_are_loaded_under_their_content_id(engine: VllmEngine, server: ServerThread, tmp_path: Path) -> None:
    one, two = (write_adapter_folder(tmp_path / word, word) for word in ("apple", "pear"))
    first, second = engine.load_adapter(one), engine.load_adapter(two)
    assert server.state.adapters == {first: str(one), second: str(two)}
    assert engine.load_adapter(one) == first
    done = engine.submit(ask([10], adapter=first)).completion()
    assert done.token_ids == expected_answer([10], first, None, 8)
    engine.unload_adapter(first)
    assert server.state.adapters == {second: str(two)}


def test_an_adapter_that_the_server_refuses_is_refused(engine: VllmEngine, tmp_path: Path) -> None:
    folder = write_adapter_folder(tmp_path / "wide", "wide")
    config = json.loads((folder / "adapter_config.json").read_text()) | {"r": 65}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="rank 65"):
        engine.load_adapter(folder)
    assert engine.adapters == frozenset()


def test_a_server_that_loads_no_adapters_says_how_to_start_it(tmp_path: Path) -> None:
    server = ServerThread(StandInVllm("m", loads_adapters=False))
    engine = VllmEngine(AttachedServer(EngineSettings(vllm_url=server.url)), vocab_size=VOCAB_SIZE)
    try:
        with pytest.raises(ModelError) as caught:
            engine.load_adapter(write_adapter_folder(tmp_path / "a", "apple"))
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in (caught.value.hint or "")
    finally:
        engine.close()
        server.stop()


def test_an_attached_server_that_comes_back_gets_its_adapters_again(
    engine: VllmEngine, server: ServerThread, tmp_path: Path
) -> None:
    adapter = engine.load_adapter(write_adapter_folder(tmp_path / "apple", "apple"))
    stream = engine.submit(ask([HANG, 10], max_tokens=100))
    next(iter(stream))
    server.stop()
    with pytest.raises(EngineError):
        list(stream)
    until(lambda: not engine.is_alive, "the loss to be seen")
    with pytest.raises(EngineError, match="started again"):
        engine.submit(ask([10]))
    again = ServerThread(StandInVllm("some/model", api_key="sk-vllm"), port=server.port)
    try:
        until(lambda: engine.is_alive, "the server")
        assert set(again.state.adapters) == {adapter}
        done = engine.submit(ask([10], adapter=adapter)).completion()
        assert done.token_ids == expected_answer([10], adapter, None, 8)
        assert engine.stats().num_restarts == 1
        engine.close()
    finally:
        again.stop()


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # empty: ended, and not waited for yet
    except FileNotFoundError:
        return False


def resolved(folder: Path) -> ResolvedModel:
    write_model(folder)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": VOCAB_SIZE}
    (folder / "config.json").write_text(json.dumps(config))
    return ResolvedModel(source=str(folder), kind="folder", folder=folder)


def test_a_started_server_is_started_again_with_its_adapters_when_it_dies(tmp_path: Path) -> None:
    settings = EngineSettings(vllm_command=COMMAND, vllm_arguments=["--max-model-len", "256"], dtype="bfloat16")
    engine = start_vllm(resolved(tmp_path / "model"), settings)
    try:
        started = json.loads((tmp_path / "model" / "vllm.json").read_text())
        for pair in (("--dtype", "bfloat16"), ("--generation-config", "vllm"), ("--max-model-len", "256")):
            assert " ".join(pair) in " ".join(started["arguments"])
        adapter = engine.load_adapter(write_adapter_folder(tmp_path / "apple", "apple"))
        with pytest.raises(EngineError):
            engine.submit(ask([CRASH])).completion()
        until(lambda: not engine.is_alive, "the loss to be seen")
        until(lambda: engine.is_alive, "the server")
        assert json.loads((tmp_path / "model" / "vllm.json").read_text())["pid"] != started["pid"]
        done = engine.submit(ask([10], adapter=adapter)).completion()
        assert done.token_ids == expected_answer([10], adapter, None, 8)
    finally:
        engine.close()
    pid = json.loads((tmp_path / "model" / "vllm.json").read_text())["pid"]
    assert not runs(pid), "the server ends with its engine"


STARTS: dict[str, tuple[dict[str, Any], type[GymError], str]] = {
    "no such command": ({"vllm_command": ["/no/such/vllm"]}, ModelError, "cannot be started"),
    "ends at once": ({"vllm_command": COMMAND, "vllm_arguments": ["--refuse"]}, ModelError, "ended with code 3"),
    "no one there": ({"vllm_url": "http://127.0.0.1:9", "vllm_start_timeout_s": 0.3}, EngineError, "no vLLM server"),
    "no key": ({"vllm_url": "http://127.0.0.1:9", "vllm_api_key_env": "NOT_SET"}, UserError, "NOT_SET"),
}


@pytest.mark.parametrize(("settings", "kind", "words"), STARTS.values(), ids=STARTS.keys())
def test_a_server_that_cannot_be_used_is_an_error_with_the_reason(
    tmp_path: Path, settings: dict[str, Any], kind: type[GymError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        start_vllm(resolved(tmp_path / "model"), EngineSettings(**settings))


def test_the_daemon_serves_through_vllm_and_takes_it_along_when_it_ends(tmp_path: Path) -> None:
    model = resolved(tmp_path / "tiny")
    settings = f'[engine]\nkind = "vllm"\nvllm_command = {json.dumps(COMMAND)}\n'
    with DaemonProcess(tmp_path / "data", str(model.folder), settings=settings, engine="") as daemon:
        with daemon.wait_ready().http() as http:
            body = {"model": "tiny", "prompt": [10, 11], "max_tokens": 5, "seed": 3}
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 5
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
            assert http.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] == 5
        pid = json.loads((model.folder / "vllm.json").read_text())["pid"]
        daemon.kill()
        until(lambda: not runs(pid), "the server to end with its daemon")
