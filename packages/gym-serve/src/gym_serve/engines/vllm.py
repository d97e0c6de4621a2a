"""A vLLM server as an `Engine`: token ids go there and come back; adapters are loaded into it while it runs.

The server is known by its HTTP API alone (see `vllm_wire`), started by the daemon or attached (see `vllm_server`). A
closed connection ends a request there within a step. When the server dies or cannot be reached, its requests get an
EngineError, the server is started again or waited for, and the adapters that were loaded are loaded again.

Adapters are loaded from their folders in the daemon's store, so an attached server must see these under the same path.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from gym_sdk.errors import GymError, ModelError
from gym_serve.engines.base import (
    EngineError,
    EngineStats,
    Finish,
    FinishReason,
    GenerationRequest,
    PromptRead,
    TokenStream,
    check_adapter,
    check_request,
)
from gym_serve.engines.vllm_server import AttachedServer, StartedServer, VllmServer
from gym_serve.engines.vllm_wire import completion_body, error_message, read_chunk, refusal
from gym_serve.models import ResolvedModel, inspect_adapter
from gym_serve.settings import EngineSettings

_logger = logging.getLogger(__name__)

QUIET_S = 300.0
"""An answer that says nothing for so long has broken off."""
LOAD_S = 300.0
_WATCH_S = 1.0
_MISSES = 3
"""Looks in a row at which a server that runs gave no answer: one that is busy may be late once."""
_WAITS_S = (0.0, 1.0, 2.0, 5.0, 15.0, 60.0)
T = TypeVar("T")


def start_vllm(model: ResolvedModel, settings: EngineSettings) -> VllmEngine:
    """The factory that the entry point `vllm` of `gym.engines` names."""
    server = AttachedServer(settings) if settings.vllm_url else StartedServer(model, settings)
    return VllmEngine(server, vocab_size=_vocab_size(model.folder))


@dataclass(eq=False)
class _Open:
    """A request on its way."""

    stream: TokenStream
    task: asyncio.Task[FinishReason]
    num_tokens: int = 0
    failure: GymError | None = None
    """What the stream ends with, should the server be lost."""


class VllmEngine:
    """An `Engine` whose work is done by a vLLM server."""

    def __init__(self, server: VllmServer, *, vocab_size: int, watch_s: float = _WATCH_S) -> None:
        """Waits until the server answers. Raises ModelError, EngineError or UserError where it cannot be used."""
        self._server = server
        self._vocab_size = vocab_size
        self._watch_s = watch_s
        self._changed = threading.Condition()
        self._open: dict[str, _Open] = {}
        self._folders: dict[str, Path] = {}
        """The adapters that requests may name, and where each was loaded from."""
        self._counts = {"prompt": 0, "generated": 0, "restarts": 0}
        self._alive = False
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="gym-vllm", daemon=True)
        self._loop_thread.start()
        self._http: httpx.AsyncClient
        self._base_name = ""
        self._context_length = 0
        try:
            self._connect()
        except BaseException:
            self._server.stop()
            self._end_loop()
            raise
        self._watcher = threading.Thread(target=self._watch, name="gym-vllm-watch", daemon=True)
        self._watcher.start()

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def adapters(self) -> frozenset[str]:
        with self._changed:
            return frozenset(self._folders)

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken now; False while the server is gone."""
        return self._alive

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Send a request. See `Engine.submit`."""
        check_request(request, context_length=self._context_length, vocab_size=self._vocab_size)
        stream = TokenStream(request, self.abort)
        with self._changed:
            if self._closing:
                raise EngineError("the engine is closed")
            if not self._alive:
                raise EngineError("the vLLM server is being started again", hint="try again in a moment")
            check_adapter(request.adapter, self._folders)
            self._loop.call_soon_threadsafe(self._begin, stream)
        return stream

    def abort(self, request_id: str) -> None:
        """End a request: its connection is closed, which ends it there. See `Engine.abort`."""
        with contextlib.suppress(RuntimeError):  # a closed engine has ended it already
            self._loop.call_soon_threadsafe(self._cancel, request_id)

    def load_adapter(self, folder: Path) -> str:
        """Load an adapter under its content id. See `Engine.load_adapter`."""
        content_id = inspect_adapter(folder).content_id
        with self._changed:
            known = content_id in self._folders
        if not known:
            self._call(self._load(content_id, folder))
            with self._changed:
                self._folders[content_id] = Path(folder)
        return content_id

    def unload_adapter(self, adapter: str) -> None:
        """Forget an adapter; requests that run on it go on. See `Engine.unload_adapter`."""
        with self._changed:
            if self._folders.pop(adapter, None) is None:
                return
        self._call(self._unload(adapter))

    def stats(self) -> EngineStats:
        """Counts of what went through this engine. The server's own metrics are at its `/metrics`."""
        return EngineStats(
            num_running=sum(open_.num_tokens > 0 for open_ in list(self._open.values())),
            num_waiting=sum(open_.num_tokens == 0 for open_ in list(self._open.values())),
            num_prompt_tokens=self._counts["prompt"],
            num_generated_tokens=self._counts["generated"],
            num_restarts=self._counts["restarts"],
        )

    def close(self) -> None:
        """End every stream, and the server if it is ours. See `Engine.close`."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._watcher.join()
        self._call(self._end_all(None))
        self._call(self._http.aclose())
        self._server.stop()
        self._end_loop()

    # Requests, on the loop's thread

    def _begin(self, stream: TokenStream) -> None:
        task = self._loop.create_task(self._answer(stream))
        open_ = self._open[stream.request.id] = _Open(stream, task)
        # In a callback, because a task that is cancelled before its first step runs none of its own code.
        task.add_done_callback(lambda task: self._end(open_, task))

    def _cancel(self, request_id: str) -> None:
        if (open_ := self._open.get(request_id)) is not None:
            open_.task.cancel()

    def _end(self, open_: _Open, task: asyncio.Task[FinishReason]) -> None:
        """The stream's end, whichever way the task has ended."""
        request = open_.stream.request
        del self._open[request.id]
        end: Finish | GymError
        if open_.failure is not None:
            end = open_.failure
        elif task.cancelled():
            end = Finish("abort", len(request.prompt_ids), open_.num_tokens)
        elif (error := task.exception()) is None:
            end = Finish(task.result(), len(request.prompt_ids), open_.num_tokens)
        elif isinstance(error, GymError):
            end = error
        else:
            end = EngineError(f"vLLM cannot be reached: {error!r}", hint="send the request again")
            with self._changed:
                self._changed.notify_all()  # the watcher looks now
        open_.stream.put([end])

    async def _answer(self, stream: TokenStream) -> FinishReason:
        """Pass the tokens on as they come; returns how the answer ended. Raises EngineError, RequestRefused."""
        request = stream.request
        body = completion_body(request, request.adapter or self._base_name, self._context_length)
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise refusal(response.status_code, await response.aread())
            self._counts["prompt"] += len(request.prompt_ids)
            finish: FinishReason | None = None
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    break
                if not line.startswith("data:"):
                    continue
                chunk = read_chunk(data, request.top_logprobs)
                if chunk.tokens:
                    self._open[request.id].num_tokens += len(chunk.tokens)
                    self._counts["generated"] += len(chunk.tokens)
                    stream.put(chunk.tokens)
                if chunk.num_cached_tokens is not None:
                    stream.put([PromptRead(chunk.num_cached_tokens)])
                finish = chunk.finish or finish
        if finish is None:
            raise EngineError("vLLM's answer broke off", hint="send the request again")
        return finish

    async def _end_all(self, failure: GymError | None) -> None:
        """Every open request ends: with an error, or aborted."""
        tasks = [open_.task for open_ in self._open.values()]
        for open_ in self._open.values():
            open_.failure = failure
            open_.task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # The server

    async def _load(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        response = await self._http.post("/v1/load_lora_adapter", json=body, timeout=LOAD_S)
        if response.status_code == 200:
            return
        message = error_message(response.content)
        if "already been loaded" in message:
            return  # under this content id, so it is this content
        hint = None
        if response.status_code == 404 and b'"error"' not in response.content:  # no such route
            hint = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        raise ModelError(f"vLLM does not take the adapter: {message}", hint=hint)

    async def _unload(self, name: str) -> None:
        response = await self._http.post("/v1/unload_lora_adapter", json={"lora_name": name}, timeout=LOAD_S)
        if response.status_code not in (200, 404):
            _logger.warning("adapter stays in vLLM adapter=%s: %s", name, error_message(response.content))

    def _connect(self) -> None:
        """Start or find the server, ask what it serves, and load the adapters that it had before."""
        self._server.start(is_wanted=lambda: not self._closing)
        if self._closing:
            return
        headers = {"authorization": f"Bearer {self._server.api_key}"} if self._server.api_key else {}
        self._http = httpx.AsyncClient(
            base_url=self._server.url,
            headers=headers,
            timeout=httpx.Timeout(QUIET_S, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )
        self._base_name, self._context_length = self._call(self._served())
        with self._changed:
            folders = dict(self._folders)
        for name, folder in folders.items():
            try:
                self._call(self._load(name, folder))
            except (GymError, httpx.HTTPError) as error:
                _logger.error("adapter was not loaded again adapter=%s: %s", name, error)
                with self._changed:
                    self._folders.pop(name, None)  # its next request loads it, or says why not
        self._alive = True

    async def _served(self) -> tuple[str, int]:
        """The base model's name and context length, from the server's list."""
        try:
            response = await self._http.get("/v1/models", timeout=30.0)
            if response.status_code != 200:
                raise refusal(response.status_code, response.content)
            cards = [card for card in response.json()["data"] if not card.get("parent")]
            names = [str(card["id"]) for card in cards]
            wanted = self._server.base_name or (names[0] if len(names) == 1 else "")
            length = next(int(card["max_model_len"]) for card in cards if card["id"] == wanted)
        except httpx.HTTPError as error:
            raise EngineError(f"vLLM cannot be reached: {error!r}") from None
        except (ValueError, KeyError, TypeError, StopIteration):
            raise ModelError(f"{self._server.url} lists no one base model with its context length") from None
        return wanted, length

    def _watch(self) -> None:
        """Looks after the server, and brings it back."""
        missed = 0
        while True:
            with self._changed:
                self._changed.wait(self._watch_s)
                if self._closing:
                    return
            ended = self._server.has_ended()
            missed = 0 if self._server.is_healthy() else missed + 1
            if ended is None and missed < _MISSES:
                continue
            missed = 0
            self._alive = False
            self._counts["restarts"] += 1
            failure = EngineError(f"the vLLM server {ended or 'does not answer'}", hint="send the request again")
            _logger.error("vLLM server lost requests=%d: %s", len(self._open), failure.message)
            self._call(self._end_all(failure))
            self._call(self._http.aclose())
            if not self._bring_back():
                return

    def _bring_back(self) -> bool:
        """Tries until the server is there; False when the engine is closed meanwhile."""
        for number in range(2**31):
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, _WAITS_S[min(number, len(_WAITS_S) - 1)]):
                    return False
            try:
                self._connect()
                return not self._closing
            except GymError as error:
                _logger.error("vLLM server did not come back: %s", error.message)
        return False

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run something on the loop and wait for it."""
        result: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return result.result()
        except httpx.HTTPError as error:
            raise EngineError(f"vLLM cannot be reached: {error!r}", hint="try again in a moment") from None

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._loop.close()


def _vocab_size(folder: Path) -> int:
    """What the model's config says; token ids are below it."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if not isinstance(size, int):
        raise ModelError(f"{folder}/config.json does not say vocab_size")
    return size
