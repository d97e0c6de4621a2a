"""The engine process: `python -m gym_serve.engines.worker FD SETTINGS`, started by `RemoteEngine`.

It loads one model, answers on the socket `FD`, and lives no longer than the process that started it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import msgspec

from gym_sdk.errors import GymError, ModelError, UserError
from gym_serve.engines.base import Engine, Finish, PromptRead, StreamItem, Token, TokenStream
from gym_serve.engines.protocol import (
    Abort,
    Close,
    Connection,
    Event,
    Events,
    Failure,
    LoadAdapter,
    Ready,
    Reply,
    Submit,
    TokenTuple,
    UnloadAdapter,
)
from gym_serve.libraries import quieten_libraries


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process is started with."""

    folder: str
    """The base model, in Hugging Face layout."""
    dtype: str = "auto"
    device: str = "cpu"
    quantization: str = "none"
    max_slots: int = 16
    step_tokens: int = 512
    context_length: int | None = None
    kv_cache_bytes: int | None = None
    num_threads: int | None = None
    trust_remote_code: bool = False
    pack_weights: bool = True
    """See `gym_serve.engines.packed`; only on a processor."""
    prefix_share: float = 0.25
    """See `gym_serve.engines.prefixes`."""


class Outbox:
    """Collects what happens and sends it in as few frames as the socket allows: one while another is being written."""

    def __init__(self, connection: Connection, engine: Engine) -> None:
        self._connection = connection
        self._engine = engine
        self._events: list[tuple[str, Sequence[StreamItem]]] = []
        self._replies: list[Reply] = []
        self._changed = threading.Condition()

    def add(self, request_id: str, items: Sequence[StreamItem]) -> None:
        """Something happened to a request."""
        with self._changed:
            self._events.append((request_id, items))
            self._changed.notify()

    def reply(self, reply: Reply) -> None:
        """A call was answered."""
        with self._changed:
            self._replies.append(reply)
            self._changed.notify()

    def run(self) -> None:
        """Send until the other side is gone."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._events or self._replies)
                events, self._events = self._events, []
                replies, self._replies = self._replies, []
            try:
                for reply in replies:
                    self._connection.send(reply)
                if events:
                    self._connection.send(Events(_merge(events), asdict(self._engine.stats())))
            except OSError:
                return
            if getattr(self._engine, "has_failed", False):
                os._exit(1)  # its requests know; the other side starts a new process


def _merge(events: Sequence[tuple[str, Sequence[StreamItem]]]) -> list[Event]:
    """One event a request, in order."""
    tokens: dict[str, list[TokenTuple]] = {}
    cached: dict[str, int] = {}
    ends: dict[str, Finish | GymError] = {}
    for request_id, items in events:
        mine = tokens.setdefault(request_id, [])
        for item in items:
            if isinstance(item, Token):
                mine.append((item.id, item.logprob, list(item.top)))
            elif isinstance(item, PromptRead):
                cached[request_id] = item.num_cached_tokens
            else:
                ends[request_id] = item
    merged: list[Event] = []
    for request_id, mine in tokens.items():
        end = ends.get(request_id)
        if isinstance(end, Finish):
            ended, failure = (end.reason, end.num_prompt_tokens, end.num_tokens), None
        else:
            ended, failure = None, failure_of(end) if end is not None else None
        merged.append(Event(request_id, mine, cached.get(request_id), ended, failure))
    return merged


def failure_of(error: Exception) -> Failure:
    """An exception as it travels."""
    if not isinstance(error, GymError):
        return Failure("engine", f"{type(error).__name__}: {error}", None)
    kind = "model" if isinstance(error, ModelError) else "user" if isinstance(error, UserError) else "engine"
    return Failure(kind, error.message, error.hint)


def serve(connection: Connection, engine: Engine) -> None:
    """Answer until the other side says `Close` or is gone."""
    outbox = Outbox(connection, engine)
    threading.Thread(target=outbox.run, name="gym-outbox", daemon=True).start()
    try:
        connection.send(Ready(engine.context_length, engine.vocab_size))
    except OSError:
        return  # who started this process is gone
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="gym-calls") as calls:
        while (message := connection.receive()) is not None:
            if isinstance(message, Submit):
                _submit(message, engine, outbox)
            elif isinstance(message, Abort):
                engine.abort(message.id)
            elif isinstance(message, LoadAdapter):
                calls.submit(_call, message.call, lambda m=message: engine.load_adapter(Path(m.folder)), outbox)
            elif isinstance(message, UnloadAdapter):
                calls.submit(_call, message.call, lambda m=message: engine.unload_adapter(m.adapter), outbox)
            elif isinstance(message, Close):
                return


def _submit(message: Submit, engine: Engine, outbox: Outbox) -> None:
    try:
        stream: TokenStream = engine.submit(message.request())
    except Exception as error:  # noqa: BLE001  (an answer of its own; the process goes on)
        outbox.add(message.id, [error if isinstance(error, GymError) else GymError(f"{type(error).__name__}: {error}")])
        return
    stream.forward(lambda items: outbox.add(message.id, items))


def _call(number: int, call: Callable[[], str | None], outbox: Outbox) -> None:
    try:
        outbox.reply(Reply(number, call()))
    except Exception as error:  # noqa: BLE001  (belongs to the caller on the other side)
        outbox.reply(Reply(number, None, failure_of(error)))


def load_engine(settings: WorkerSettings) -> Engine:
    """The embedded engine that the settings describe."""
    import torch

    from gym_serve.engines.transformers import TransformersEngine
    from gym_serve.models import ResolvedModel, load_model

    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    folder = Path(settings.folder)
    model = load_model(
        ResolvedModel(source=settings.folder, kind="folder", folder=folder),
        dtype=settings.dtype,  # type: ignore[arg-type]
        device=settings.device,
        quantization=settings.quantization,  # type: ignore[arg-type]
        trust_remote_code=settings.trust_remote_code,
    )
    return TransformersEngine(
        model,
        max_slots=settings.max_slots,
        step_tokens=settings.step_tokens,
        context_length=settings.context_length,
        kv_cache_bytes=settings.kv_cache_bytes,
        tokenizer_json=folder / "tokenizer.json",
        pack_weights=settings.pack_weights,
        prefix_share=settings.prefix_share,
    )


def main() -> int:
    """Run the process."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the process that started this one, which will say Close
    connection = Connection(socket.socket(fileno=int(sys.argv[1])), engine_side=True)
    settings = msgspec.json.decode(sys.argv[2], type=WorkerSettings)
    quieten_libraries()
    try:
        engine = load_engine(settings)
    except Exception as error:  # noqa: BLE001  (told to the process that waits for Ready)
        connection.send(failure_of(error))
        return 1
    serve(connection, engine)
    engine.close()
    return 0


if __name__ == "__main__":
    os._exit(main())  # no thread of a library may hold a dead engine's memory
