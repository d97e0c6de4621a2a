"""An engine in a process of its own, so that neither the API nor the model blocks or breaks the other.

When the engine process dies, each of its requests gets an EngineError, the process is started again (at once, then
after longer and longer waits while it keeps dying), and the adapters that were loaded are loaded again. Until then new
requests are refused with an EngineError. See `protocol` for what the two processes say.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import msgspec

from gym_sdk.errors import GymError, ModelError
from gym_serve.engines.base import (
    EngineError,
    EngineStats,
    Finish,
    GenerationRequest,
    PromptRead,
    RequestRefused,
    StreamItem,
    TokenStream,
    check_adapter,
    check_request,
)
from gym_serve.engines.protocol import (
    Abort,
    Close,
    Connection,
    Events,
    Failure,
    LoadAdapter,
    Ready,
    Reply,
    Submit,
    UnloadAdapter,
    finish_of,
    stats_of,
    token_of,
)
from gym_serve.engines.worker import WorkerSettings

_logger = logging.getLogger(__name__)

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
CLOSE_TIMEOUT_S = 10.0


class RemoteEngine:
    """An `Engine` whose work is done by a child process."""

    def __init__(self, settings: WorkerSettings, *, worker: str = "gym_serve.engines.worker") -> None:
        """Start the process and wait until its model is loaded. `worker` is the module that runs in it.

        Raises:
            ModelError: as `load_model` and `TransformersEngine` raise.
        """
        self._settings = settings
        self._worker = worker
        self._changed = threading.Condition()
        self._streams: dict[str, TokenStream] = {}
        self._num_tokens: Counter[str] = Counter()
        """What each open stream has got so far."""
        self._calls: dict[int, Future[str | None]] = {}
        self._next_call = 0
        self._folders: dict[str, Path] = {}
        """The adapters that requests may name, and where each was loaded from."""
        self._missing: set[str] = set()
        """Those of them that a new process does not have yet."""
        self._stats = EngineStats()
        self._num_restarts = 0
        self._closing = False
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._context_length = self._vocab_size = 0
        self._start()
        self._thread = threading.Thread(target=self._run, name="gym-engine-process", daemon=True)
        self._thread.start()

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
        """Whether requests are taken now; False while the process is being started again, its adapters included."""
        with self._changed:
            return self._connection is not None and not self._missing

    @property
    def pid(self) -> int | None:
        """The engine process."""
        process = self._process
        return process.pid if process is not None else None

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Queue a request. See `Engine.submit`."""
        check_request(request, context_length=self._context_length, vocab_size=self._vocab_size)
        stream = TokenStream(request, self.abort)
        with self._changed:
            check_adapter(request.adapter, self._folders)
            if request.adapter in self._missing:
                raise EngineError("the adapter is being loaded again", hint="try again in a moment")
            self._streams[request.id] = stream
            try:
                self._send(Submit.of(request))
            except EngineError:
                del self._streams[request.id]
                raise
        return stream

    def abort(self, request_id: str) -> None:
        """End a request within a step. See `Engine.abort`."""
        with self._changed:
            if request_id in self._streams and self._connection is not None:
                self._send(Abort(request_id))

    def load_adapter(self, folder: Path) -> str:
        """Load an adapter. The folder must not change afterwards: it is read again when the process is restarted."""
        adapter = self._call(lambda call: LoadAdapter(call, str(folder)))
        assert adapter is not None
        with self._changed:
            self._folders[adapter] = Path(folder)
        return adapter

    def unload_adapter(self, adapter: str) -> None:
        """Forget an adapter when its last request ends. See `Engine.unload_adapter`."""
        with self._changed:
            self._folders.pop(adapter, None)
            self._missing.discard(adapter)
        self._call(lambda call: UnloadAdapter(call, adapter))

    def stats(self) -> EngineStats:
        """Counts, as of the last step; `num_restarts` counts the process's deaths."""
        with self._changed:
            return replace(self._stats, num_restarts=self._num_restarts)

    def close(self) -> None:
        """End every stream and the process. See `Engine.close`."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            if self._connection is not None:
                self._send(Close())
            self._changed.notify_all()
        process = self._process
        if process is not None:
            try:
                process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._thread.join()

    # The process

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        settings = msgspec.json.encode(self._settings).decode()
        environment = dict(os.environ)
        if self._settings.num_threads is not None:
            environment["OMP_NUM_THREADS"] = str(self._settings.num_threads)
        process = subprocess.Popen(
            [sys.executable, "-m", self._worker, str(theirs.fileno()), settings],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        connection = Connection(ours, engine_side=False)
        self._process = process
        message = connection.receive()
        if not isinstance(message, Ready):
            connection.close()
            process.wait()
            if isinstance(message, Failure):
                raise _error_of(message)
            raise EngineError(f"the engine process {_how_it_ended(process)} while it loaded the model")
        with self._changed:
            self._context_length, self._vocab_size = message.context_length, message.vocab_size
            self._connection = connection

    def _run(self) -> None:
        """Read what the process says; when it dies, say so to its requests and start it again."""
        wait_s = 0.0
        while True:
            connection = self._connection
            if connection is not None and self._read(connection):
                wait_s = 0.0  # it answered something: not a process that dies at once
            self._lost()
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, timeout=wait_s):
                    return
            wait_s = min(LONGEST_WAIT_S, max(FIRST_WAIT_S, 2 * wait_s))
            try:
                self._start()
            except GymError as error:
                _logger.error("engine process did not start: %s", error)
                continue
            threading.Thread(target=self._reload, name="gym-reload", daemon=True).start()

    def _read(self, connection: Connection) -> bool:
        heard = False
        while (message := connection.receive()) is not None:
            heard = True
            if isinstance(message, Events):
                self._events(message)
            elif isinstance(message, Reply):
                with self._changed:
                    result = self._calls.pop(message.call, None)
                if result is not None:
                    if message.failure is not None:
                        result.set_exception(_error_of(message.failure))
                    else:
                        result.set_result(message.value)
        return heard

    def _events(self, message: Events) -> None:
        with self._changed:
            self._stats = stats_of(message.stats)
        for event in message.events:
            ended = event.finish is not None or event.failure is not None
            with self._changed:
                stream = self._streams.pop(event.id, None) if ended else self._streams.get(event.id)
            if stream is None:
                continue
            items: list[StreamItem] = [token_of(token) for token in event.tokens]
            self._num_tokens[event.id] += len(items)
            if event.num_cached_tokens is not None:
                items.insert(0, PromptRead(event.num_cached_tokens))
            if ended:
                del self._num_tokens[event.id]
            if event.finish is not None:
                stream.put([*items, finish_of(event.finish)])
            elif event.failure is not None:
                stream.put([*items, _error_of(event.failure)])
            else:
                stream.put(items)

    def _lost(self) -> None:
        """The connection has ended: the process is gone or going."""
        process = self._process
        assert process is not None
        if process.poll() is None and not self._closing:
            process.kill()  # it hung up without dying
        process.wait()
        with self._changed:
            connection, self._connection = self._connection, None
            streams, self._streams = self._streams, {}
            calls, self._calls = self._calls, {}
            self._stats = replace(self._stats, num_running=0, num_waiting=0, kv_used_tokens=0)
            self._missing = set(self._folders)
            if not self._closing:
                self._num_restarts += 1
        if connection is not None:
            connection.close()
        failure = EngineError(f"the engine process {_how_it_ended(process)}", hint="send the request again")
        if not self._closing:
            _logger.error("engine process died requests=%d: %s", len(streams), failure.message)
        counts, self._num_tokens = self._num_tokens, Counter()
        for name, stream in streams.items():
            aborted = Finish("abort", len(stream.request.prompt_ids), counts[name])
            stream.put([aborted if self._closing else failure])
        for call in calls.values():
            call.set_exception(failure)

    def _reload(self) -> None:
        with self._changed:
            folders = dict(self._folders)
        for adapter, folder in folders.items():
            try:
                found = self._call(lambda call, folder=folder: LoadAdapter(call, str(folder)))
            except EngineError:
                return  # this process has died too: the next one's start loads them
            except GymError as error:
                found = None
                _logger.error("adapter was not loaded again adapter=%s: %s", adapter, error)
            with self._changed:
                self._missing.discard(adapter)
                if found != adapter:
                    self._folders.pop(adapter, None)  # never another adapter under this id

    def _call(self, make: Callable[[int], LoadAdapter | UnloadAdapter]) -> str | None:
        result: Future[str | None] = Future()
        with self._changed:
            number = self._next_call
            self._next_call += 1
            self._calls[number] = result
            try:
                self._send(make(number))
            except EngineError:
                del self._calls[number]
                raise
        return result.result()

    def _send(self, message: Submit | Abort | LoadAdapter | UnloadAdapter | Close) -> None:
        """Under the lock, which keeps frames whole."""
        if self._closing and not isinstance(message, Close):
            raise EngineError("the engine is closed")
        if self._connection is None:
            raise EngineError("the engine process is being started again", hint="try again in a moment")
        try:
            self._connection.send(message)
        except OSError as error:
            raise EngineError("the engine process is gone", hint="try again in a moment") from error


def _error_of(failure: Failure) -> GymError:
    kind = {"user": RequestRefused, "model": ModelError, "engine": EngineError}[failure.kind]
    return kind(failure.message, hint=failure.hint)


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"
