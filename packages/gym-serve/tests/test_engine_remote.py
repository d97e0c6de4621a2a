"""Guards the engine in its own process: the same tokens, errors that say what happened, and life after a crash."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from peft import PeftModel

from gym_sdk.errors import ModelError
from gym_serve.engines.base import (
    EngineError,
    GenerationRequest,
    PromptTooLong,
    RequestRefused,
    SamplingParams,
    generate_all,
)
from gym_serve.engines.protocol import Submit
from gym_serve.engines.remote import RemoteEngine
from gym_serve.engines.worker import WorkerSettings

tiny = importlib.import_module("tiny_models")
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("model")
    tiny.tiny_model().save_pretrained(folder)
    remote = RemoteEngine(WorkerSettings(folder=str(folder), max_slots=4, num_threads=1))
    yield remote
    remote.close()


def request(prompt: list[int], **settings) -> GenerationRequest:
    return GenerationRequest(prompt_ids=prompt, **({"max_tokens": 20, "sampling": GREEDY} | settings))


def test_tokens_equal_those_of_the_engine_itself(engine: RemoteEngine, tmp_path: Path) -> None:
    folder = tiny.write_adapter(tmp_path / "a", seed=1)
    adapter = engine.load_adapter(folder)
    prompts = tiny.prompts(6)
    base = tiny.tiny_model()
    tuned = PeftModel.from_pretrained(tiny.tiny_model(), str(folder)).eval()
    expected = [tiny.greedy_reference(tuned if i % 2 else base, prompt, 20) for i, prompt in enumerate(prompts)]
    requests = [request(prompt, adapter=adapter if i % 2 else None) for i, prompt in enumerate(prompts)]
    answers = generate_all(engine, requests)
    assert [answer.token_ids for answer in answers] == expected
    assert engine.stats().num_generated_tokens >= 6 * 20
    engine.unload_adapter(adapter)
    with pytest.raises(RequestRefused, match="no adapter"):
        engine.submit(requests[1])


def test_what_of_a_prompt_was_read_before_is_told(engine: RemoteEngine) -> None:
    (prompt,) = tiny.prompts(1, seed=21, low=40, high=41)
    counts = []
    for _ in range(2):
        stream = engine.submit(request(prompt, max_tokens=4))
        stream.completion()
        counts.append(stream.num_cached_tokens)
    assert counts == [0, len(prompt) - 1], "the last one is read in any case"


def test_all_settings_travel(engine: RemoteEngine) -> None:
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=2**40, logit_bias={5: -100.0, 7: 1.5})
    sent = request([4, 5], sampling=sampling, stop_ids=frozenset([9, 3]), top_logprobs=2, max_tokens=None)
    assert Submit.of(sent).request() == sent
    token = next(iter(engine.submit(request([5, 6], top_logprobs=2))))
    assert token.logprob == pytest.approx(token.top[0][1])
    assert token.top[0][0] == token.id


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"prompt_ids": [5] * 400}, PromptTooLong),
        ({"prompt_ids": [999]}, RequestRefused),
        ({"prompt_ids": [5], "grammar": "start: ("}, RequestRefused),
        ({"prompt_ids": [5], "adapter": "sha256:nobody"}, RequestRefused),
    ],
)
def test_refusals_are_made_at_submit(engine: RemoteEngine, settings: dict, error: type[Exception]) -> None:
    with pytest.raises(error):
        engine.submit(GenerationRequest(**settings))


def test_a_bad_adapter_is_refused_and_the_engine_goes_on(engine: RemoteEngine, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no adapter_config"):
        engine.load_adapter(tmp_path)
    assert engine.submit(request([5])).completion().finish.reason == "length"


def test_an_abort_arrives(engine: RemoteEngine) -> None:
    stream = engine.submit(request([5, 6], max_tokens=240))
    tokens = []
    for token in stream:
        tokens.append(token)
        if len(tokens) == 2:
            stream.abort()
    assert stream.finish.reason == "abort"
    assert len(tokens) < 240


def test_a_crash_is_an_error_to_its_requests_then_the_engine_is_back_with_its_adapters(
    engine: RemoteEngine, tmp_path: Path
) -> None:
    folder = tiny.write_adapter(tmp_path / "a", seed=1)
    adapter = engine.load_adapter(folder)
    streams = [engine.submit(request([5, 6, i + 5], max_tokens=240)) for i in range(3)]
    before = engine.stats().num_restarts
    next(iter(streams[0]))
    os.kill(engine.pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(EngineError, match="ended by SIGKILL"):
            stream.completion()
    expected = tiny.greedy_reference(PeftModel.from_pretrained(tiny.tiny_model(), str(folder)).eval(), [5, 6], 20)
    answer = None
    while answer is None:  # refused while it starts; the whole test has a time limit
        try:
            answer = engine.submit(request([5, 6], adapter=adapter)).completion()
        except (EngineError, RequestRefused):
            threading.Event().wait(0.05)
    assert answer.token_ids == expected
    assert engine.stats().num_restarts == before + 1


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="cannot be loaded"):
        RemoteEngine(WorkerSettings(folder=str(tmp_path)))


def test_the_api_side_loads_no_torch() -> None:
    code = "import sys, gym_serve.engines.remote, gym_serve.inference.chat; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_process_does_not_outlive_its_parent(tmp_path: Path) -> None:
    tiny.tiny_model().save_pretrained(tmp_path)
    code = (
        "import os, sys\n"
        "from gym_serve.engines.remote import RemoteEngine\n"
        "from gym_serve.engines.worker import WorkerSettings\n"
        f"engine = RemoteEngine(WorkerSettings(folder={str(tmp_path)!r}, num_threads=1))\n"
        "print(engine.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    read, write = os.pipe()  # the engine process inherits `write`: its end is the end of the file
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=write)
    os.close(write)
    assert int(parent.stdout.readline()) != parent.pid
    assert parent.wait() == -9
    with os.fdopen(read, "rb") as errors:
        errors.read()  # returns once no process holds the other end
