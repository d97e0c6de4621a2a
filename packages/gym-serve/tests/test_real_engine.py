"""Guards the daemon on its real engine: what it answers is what transformers says, for the base and for an adapter."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest
from daemon_process import DaemonProcess
from model_folder import VOCAB_SIZE, write_tokenizer
from tiny_models import greedy_reference, tiny_model


def write_tiny(folder: Path) -> Path:
    """A random llama with the byte-level tokenizer."""
    model = tiny_model(vocab_size=VOCAB_SIZE, eos_token_id=2, max_position_embeddings=512)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_daemon_says_what_the_model_says_also_after_its_engine_was_killed(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    prompt = [5, 80, 33, 120, 9]
    expected = greedy_reference(
        tiny_model(vocab_size=VOCAB_SIZE, eos_token_id=2, max_position_embeddings=512), prompt, 12
    )
    if 2 in expected:
        expected = expected[: expected.index(2) + 1]
    with DaemonProcess(tmp_path / "data", str(folder), "--dtype", "float32", engine="") as daemon:
        deadline = time.monotonic() + 240
        while httpx.get(f"{daemon.http_url}/readyz").status_code != 200:
            assert time.monotonic() < deadline, daemon.log
            time.sleep(0.05)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 0}
        with daemon.http() as http:
            http.timeout = 200.0
            answer = http.post("/v1/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] == len(expected)
            assert answer["usage"]["prompt_tokens"] == len(prompt)
            first = answer["choices"][0]
            engines = [
                int(path.parent.name)
                for path in Path("/proc").glob("[0-9]*/cmdline")
                if b"gym_serve.engines.worker" in path.read_bytes() and str(folder).encode() in path.read_bytes()
            ]
            assert len(engines) == 1
            os.kill(engines[0], signal.SIGKILL)
            again = http.post("/v1/completions", json=body)
            while again.status_code == 503:
                assert time.monotonic() < deadline, daemon.log
                again = http.post("/v1/completions", json=body)
            assert again.status_code == 200, again.text + daemon.log
            assert again.json()["choices"][0] == first
            long = {"model": "tiny", "prompt": prompt * 8, "max_tokens": 1, "temperature": 0}
            cached = [
                http.post("/v1/completions", json=long).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                for _ in range(2)
            ]
            assert cached == [0, len(prompt) * 8 - 1]
            schema = {
                "type": "object",
                "properties": {"seen": {"enum": ["elephant", "rhino"]}},
                "required": ["seen"],
                "additionalProperties": False,
            }
            form = {"type": "json_schema", "json_schema": {"name": "sighting", "strict": True, "schema": schema}}
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "response_format": form}
            held = http.post("/v1/chat/completions", json=chat).json()["choices"][0]
            assert (held["finish_reason"], json.loads(held["message"]["content"])["seen"] in ("elephant", "rhino")) == (
                "stop",
                True,
            ), held
            metrics = http.get("/metrics").text
            assert "gym_engine_restarts 1.0" in metrics
            assert again.json()["usage"] == answer["usage"]
