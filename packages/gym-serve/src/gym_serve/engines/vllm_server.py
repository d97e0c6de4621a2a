"""The vLLM server behind the engine: started by the daemon in an environment of its own, or attached by its address.

vLLM pins torch and transformers to versions of its own, so it is never imported: it runs as `vllm serve` from whatever
environment `engine.vllm_command` names, and dies with the daemon.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import httpx

from gym_sdk.errors import ModelError, UserError
from gym_serve.engines.base import EngineError
from gym_serve.models import ResolvedModel
from gym_serve.settings import EngineSettings

BASE_NAME = "base"
"""The name of the base model in a server that the daemon starts."""
_POLL_S = 0.2
_HEALTH_S = 10.0
_END_S = 20.0
_PR_SET_PDEATHSIG = 1
_LOG = 2
"""The daemon's standard error."""


class VllmServer(Protocol):
    """Where a vLLM server is, and how it comes back."""

    url: str
    api_key: str
    base_name: str
    """The name that requests for the base model carry; empty: the server's only base."""

    def start(self, *, is_wanted: Callable[[], bool]) -> None:
        """Waits until the server answers, starting it first where that is ours to do. Raises `GymError`; returns early
        when it is no longer wanted."""
        ...

    def is_healthy(self) -> bool:
        """Whether it answers and its engine lives."""
        ...

    def has_ended(self) -> str | None:
        """How the server's process ended, where there is one and it did."""
        ...

    def stop(self) -> None:
        """Ends what `start` started."""
        ...


class _Watched:
    """What both kinds share: an address whose health is asked for."""

    def __init__(self, url: str) -> None:
        self.url: str = url
        self._client = httpx.Client(timeout=_HEALTH_S)

    def _moves_to(self, url: str) -> None:
        self.url = url

    def is_healthy(self) -> bool:
        """Whether it answers and its engine lives."""
        try:
            return self._client.get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False


class AttachedServer(_Watched):
    """A server that someone else runs."""

    def __init__(self, settings: EngineSettings) -> None:
        """Raises UserError where the key's variable is not set."""
        super().__init__(settings.vllm_url.rstrip("/").removesuffix("/v1"))
        self.api_key: str = ""
        self.base_name: str = ""
        if variable := settings.vllm_api_key_env:
            self.api_key = os.environ.get(variable, "").strip()
            if not self.api_key:
                raise UserError(f"the environment has no {variable}, which holds the key of {self.url}")
        self._start_timeout_s = settings.vllm_start_timeout_s

    def start(self, *, is_wanted: Callable[[], bool]) -> None:
        """Waits until it is healthy."""
        deadline = time.monotonic() + self._start_timeout_s
        while not self.is_healthy():
            if not is_wanted():
                return
            if time.monotonic() > deadline:
                raise EngineError(
                    f"no vLLM server answers at {self.url}", hint="start it, or leave engine.vllm_url empty"
                )
            time.sleep(_POLL_S)

    def has_ended(self) -> str | None:
        """Not ours to know."""
        return None

    def stop(self) -> None:
        """It is not ours to end."""


class StartedServer(_Watched):
    """`vllm serve` as a child process on a free loopback port, with a key that nobody else has."""

    def __init__(self, model: ResolvedModel, settings: EngineSettings) -> None:
        super().__init__("")
        self.api_key: str = secrets.token_urlsafe(24)
        self.base_name: str = BASE_NAME
        self._model = model
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def command(self, port: int) -> list[str]:
        """The command line."""
        settings = self._settings
        return [
            *settings.vllm_command,
            "serve",
            str(self._model.folder),
            *("--served-model-name", BASE_NAME),
            *("--host", "127.0.0.1"),
            *("--port", str(port)),
            *("--dtype", settings.dtype),
            # Gym applies the model's generation config itself, and renders every prompt.
            *("--generation-config", "vllm"),
            "--enable-prompt-tokens-details",
            "--enable-lora",
            *("--max-loras", str(settings.vllm_max_adapters)),
            *("--max-lora-rank", str(settings.vllm_max_adapter_rank)),
            *("--max-num-seqs", str(settings.max_batch_size)),
            *settings.vllm_arguments,
        ]

    def start(self, *, is_wanted: Callable[[], bool]) -> None:
        """Starts the process and waits until it is healthy. Raises EngineError, or ModelError where it cannot start."""
        self.stop()
        port = _free_port()
        environment = {
            **os.environ,
            "VLLM_API_KEY": self.api_key,  # not an argument: those can be read by every user of the machine
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            **_visible(self._settings),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        self._process = _spawn(self.command(port), environment)
        self._moves_to(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + self._settings.vllm_start_timeout_s
        while is_wanted() and not self.is_healthy():
            if (ended := self.has_ended()) is not None:
                raise ModelError(f"vLLM {ended} before it answered; its log is in the daemon's")
            if time.monotonic() > deadline:
                self.stop()
                raise EngineError("vLLM did not answer in time", hint="raise engine.vllm_start_timeout_s")
            time.sleep(_POLL_S)

    def has_ended(self) -> str | None:
        """How the process ended."""
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return None
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def stop(self) -> None:
        """Ends the process: asked first, then by force."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        if process.returncode is None:
            process.kill()
            process.wait()


def _visible(settings: EngineSettings) -> dict[str, str]:
    """The server's GPUs, among those that the daemon may see."""
    name, _, first = settings.device.partition(":")
    if name != "cuda" or not first:
        return {}
    own = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    indices = range(int(first), int(first) + settings.num_gpus)
    return {"CUDA_VISIBLE_DEVICES": ",".join(own[index] if own else str(index) for index in indices)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _spawn(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts a process that the kernel ends with this one. Raises ModelError."""
    libc = ctypes.CDLL(None)
    started: Future[subprocess.Popen[bytes]] = Future()

    def end_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    def run() -> None:
        # The kernel means the thread that started it, so one stays for as long as the process does.
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=_LOG, env=environment, preexec_fn=end_with_parent
            )
        except OSError as error:
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()

    threading.Thread(target=run, name="gym-vllm-process", daemon=True).start()
    try:
        return started.result()
    except OSError as error:
        raise ModelError(
            f"vLLM cannot be started: {command[0]}: {error.strerror}",
            hint="install it in an environment of its own and name its command in engine.vllm_command",
        ) from None
