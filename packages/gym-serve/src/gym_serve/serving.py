"""Which engines run, and which models are in them.

An engine holds one base model and any number of its adapters. The first request for a model starts what it needs;
others for the same model wait for that start instead of starting a second one. At most `max_loaded_bases` engines run:
the one that was used least recently gives way when nothing runs on it.

An engine that fails is replaced: its requests get an error that says so, and the next one starts it anew. One that
restarts itself (`is_alive`) is waited for instead.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, cast, runtime_checkable

from gym_data.experience import ExperienceLibrary, read_library
from gym_sdk.errors import GymError, UserError
from gym_serve.catalog import Catalog, Model, ModelKind
from gym_serve.engines.base import Engine, EngineError, EngineStats
from gym_serve.errors import Reason, ServiceError
from gym_serve.inference import ChatModel
from gym_serve.models import ResolvedModel, resolve
from gym_serve.settings import EngineSettings

logger: logging.Logger = logging.getLogger(__name__)

_RESTART_S = 60.0
"""How long a request waits for an engine that restarts itself."""
_AWAY_RETRY_S = 30.0
_RETRY_START_S = 5.0
"""How long a failed start is remembered, so that a hundred waiting requests do not cause a hundred starts."""


class EngineFactory(Protocol):
    """What the entry points `gym.engines` name."""

    def __call__(self, model: ResolvedModel, settings: EngineSettings) -> Engine:
        """Loads a base model. Blocks; raises `GymError`."""
        ...


@runtime_checkable
class SelfHealing(Protocol):
    """An engine that starts its process again by itself."""

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests now."""
        ...


class Presence(StrEnum):
    """Where a model is."""

    AVAILABLE = "available"
    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"


@dataclass(kw_only=True)
class LoadedBase:
    """An engine and what it serves."""

    base: Model
    resolved: ResolvedModel
    engine: Engine
    chat_model: ChatModel
    adapters: dict[str, ChatModel] = field(default_factory=dict)
    """What is loaded besides, by the version's content id."""
    num_open: int = 0
    """Requests that run on it."""
    used_at: float = 0.0
    heals_itself: bool = False
    """Whether the engine is a `SelfHealing` one: asked once, for looking a protocol's members up takes its time."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """All that a request on a model needs. `release` must be called when it ends."""

    model: Model
    chat_model: ChatModel
    release: Callable[[], None]


class Serving:
    """The engines of the daemon."""

    def __init__(self, catalog: Catalog, settings: EngineSettings, factory: EngineFactory) -> None:
        self._catalog = catalog
        self._settings = settings
        self._factory = factory
        self._bases: dict[str, LoadedBase] = {}
        self._starting: dict[str, asyncio.Task[LoadedBase]] = {}
        self._failures: dict[str, tuple[float, GymError]] = {}
        self._adapter_locks: dict[str, asyncio.Lock] = {}
        self._libraries: dict[str, ExperienceLibrary] = {}
        """By the version's content id."""
        self._num_replaced = 0
        self._away: str | None = None
        """Why models are kept out of memory."""

    async def use(self, model: Model) -> Ready:
        """The engine for one request, with the model in it. Raises `GymError` where it cannot be loaded, and
        `ServiceError` while it has to stay out of memory."""
        if self._away is not None:
            raise ServiceError(
                Reason.ENGINE_DOWN,
                self._away,
                hint="try again later; engine.gpu_policy in the daemon's settings decides this",
                retry_after_s=_AWAY_RETRY_S,
            )
        loaded = await self._base(self._catalog.base_of(model))
        loaded.num_open += 1
        loaded.used_at = time.monotonic()

        def release() -> None:
            loaded.num_open -= 1

        try:
            await _until_alive(loaded)
            chat_model = loaded.chat_model
            below = self._catalog.stands_on(model) if model.kind is ModelKind.EXPERIENCES else model
            if below.kind is ModelKind.ADAPTER:
                chat_model = await self._adapter(loaded, below)
            if below is not model:
                chat_model = chat_model.with_experiences(await self._library(model))
            return Ready(model=model, chat_model=chat_model, release=release)
        except BaseException:
            release()
            raise

    async def load(self, model: Model) -> None:
        """Puts a model into its engine, which is started if need be."""
        (await self.use(model)).release()

    async def load_beside(self, model: Model) -> None:
        """Puts a new adapter or library before its base, if that is loaded; otherwise its first request does."""
        base = self._catalog.base_of(model)
        if model.kind is not ModelKind.BASE and base.id in self._bases and self._away is None:
            await self.load(model)

    async def unload(self, model: Model) -> None:
        """Takes a model out of memory. Requests that run on an adapter end first; a base with requests stays."""
        loaded = self._bases.get(self._catalog.base_id_of(model))
        if model.kind is ModelKind.EXPERIENCES and model.content_id is not None:
            self._libraries.pop(model.content_id, None)
        if loaded is None:
            return
        if model.kind is ModelKind.BASE:
            if loaded.num_open:
                raise ServiceError(Reason.IN_USE, f"{loaded.num_open} requests run on '{model.id}'")
            await self._close(loaded)
        elif model.content_id is not None and (chat_model := loaded.adapters.pop(model.content_id, None)) is not None:
            assert chat_model.adapter is not None
            await asyncio.to_thread(loaded.engine.unload_adapter, chat_model.adapter)

    async def go_away(self, why: str) -> None:
        """Takes every model out of memory and keeps it out until `come_back`. Running answers may go on for
        `engine.yield_after_s`; new ones are refused at once."""
        self._away = why
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        deadline = time.monotonic() + self._settings.yield_after_s
        while any(loaded.num_open for loaded in self._bases.values()) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await asyncio.gather(*(self._close(loaded) for loaded in list(self._bases.values())))

    def come_back(self) -> None:
        """Models may be loaded again."""
        self._away = None

    def presence(self, model: Model) -> tuple[Presence, str]:
        """Where a model is, and why where it failed."""
        if model.kind is ModelKind.EXPERIENCES:
            return self.presence(self._catalog.stands_on(model))
        base_id = self._catalog.base_id_of(model)
        if base_id in self._starting:
            return Presence.LOADING, ""
        loaded = self._bases.get(base_id)
        if loaded is None and self._away is not None:
            return Presence.AVAILABLE, self._away
        if loaded is None:
            failure = self._failures.get(base_id)
            return (Presence.FAILED, failure[1].message) if failure else (Presence.AVAILABLE, "")
        if model.kind is ModelKind.BASE or model.content_id in loaded.adapters:
            return Presence.LOADED, ""
        return Presence.AVAILABLE, ""

    def context_length(self, model: Model) -> int:
        """The most tokens of a prompt and its answer; 0 where it is not known before loading."""
        loaded = self._bases.get(self._catalog.base_id_of(model))
        return loaded.engine.context_length if loaded else 0

    def stats(self) -> EngineStats:
        """The counts of all engines together."""
        each = [loaded.engine.stats() for loaded in self._bases.values()]
        names = EngineStats.__dataclass_fields__
        return EngineStats(**{name: sum(getattr(stats, name) for stats in each) for name in names})

    @property
    def num_restarts(self) -> int:
        """How often an engine died and was, or will be, started anew."""
        return self._num_replaced + self.stats().num_restarts

    async def failed(self, ready: Ready, error: EngineError) -> None:
        """An engine failed under a request: it is dropped, and the next request starts it anew."""
        loaded = self._bases.get(self._catalog.base_id_of(ready.model))
        if loaded is None or loaded.engine is not ready.chat_model.engine:
            return
        logger.error("engine of %s failed: %s", loaded.base.id, error.message)
        if not loaded.heals_itself:
            self._num_replaced += 1
            await self._close(loaded)

    async def close(self) -> None:
        """Ends every engine."""
        for task in self._starting.values():
            task.cancel()
        await asyncio.gather(*(self._close(loaded) for loaded in list(self._bases.values())))

    async def _base(self, base: Model) -> LoadedBase:
        loaded = self._bases.get(base.id)
        if loaded is not None:
            return loaded
        failure = self._failures.get(base.id)
        if failure is not None and time.monotonic() - failure[0] < _RETRY_START_S:
            raise failure[1]
        task = self._starting.get(base.id)
        if task is None:
            task = asyncio.create_task(self._start(base), name=f"load-{base.id}")
            self._starting[base.id] = task
            task.add_done_callback(lambda _: self._starting.pop(base.id, None))
        # Shielded: a client that gives up must not end the start for which others wait.
        return await asyncio.shield(task)

    async def _start(self, base: Model) -> LoadedBase:
        await self._make_room()
        started = time.monotonic()
        logger.info("loading %s", base.id)
        try:
            resolved = await asyncio.to_thread(
                resolve, base.source, revision=base.revision, on_progress=_log_progress()
            )
            engine = await asyncio.to_thread(self._factory, resolved, self._settings)
        except GymError as error:
            logger.error("loading %s failed: %s", base.id, error)
            self._failures[base.id] = (time.monotonic(), error)
            raise
        self._failures.pop(base.id, None)
        logger.info("loaded %s in %.1f s", base.id, time.monotonic() - started)
        loaded = LoadedBase(
            base=base,
            resolved=resolved,
            engine=engine,
            chat_model=await asyncio.to_thread(ChatModel, engine, resolved.folder),
            used_at=time.monotonic(),
            heals_itself=isinstance(engine, SelfHealing),
        )
        self._bases[base.id] = loaded
        return loaded

    async def _make_room(self) -> None:
        while len(self._bases) >= self._settings.max_loaded_bases:
            idle = [loaded for loaded in self._bases.values() if not loaded.num_open]
            if not idle:
                raise ServiceError(
                    Reason.ENGINE_DOWN,
                    f"{len(self._bases)} base models are in use, as many as are held at once",
                    hint="try again later, or raise engine.max_loaded_bases",
                    retry_after_s=5.0,
                )
            await self._close(min(idle, key=lambda loaded: loaded.used_at))

    async def _adapter(self, loaded: LoadedBase, model: Model) -> ChatModel:
        assert model.content_id is not None
        lock = self._adapter_locks.setdefault(model.content_id, asyncio.Lock())
        async with lock:
            known = loaded.adapters.get(model.content_id)
            if known is None or known.adapter not in loaded.engine.adapters:

                def load() -> ChatModel:
                    adapter = loaded.engine.load_adapter(model.folder)
                    return ChatModel(
                        loaded.engine, loaded.resolved.folder, adapter=adapter, adapter_folder=model.folder
                    )

                loaded.adapters[model.content_id] = await asyncio.to_thread(load)
            return loaded.adapters[model.content_id]

    async def _library(self, model: Model) -> ExperienceLibrary:
        assert model.content_id is not None
        if model.content_id not in self._libraries:
            self._libraries[model.content_id] = await asyncio.to_thread(read_library, model.folder)
        return self._libraries[model.content_id]

    async def _close(self, loaded: LoadedBase) -> None:
        if self._bases.get(loaded.base.id) is loaded:
            del self._bases[loaded.base.id]
        await asyncio.to_thread(loaded.engine.close)
        logger.info("unloaded %s", loaded.base.id)


async def _until_alive(loaded: LoadedBase) -> None:
    """Waits while an engine restarts itself. Raises `EngineError` when that takes too long."""
    if not loaded.heals_itself:
        return
    engine = cast(SelfHealing, loaded.engine)
    deadline = time.monotonic() + _RESTART_S
    while not engine.is_alive:
        if time.monotonic() > deadline:
            raise EngineError("the engine's process is being started again", hint="try again later")
        await asyncio.sleep(0.05)


def start_transformers(model: ResolvedModel, settings: EngineSettings) -> Engine:
    """The embedded engine, in a process of its own."""
    from gym_serve.engines.remote import RemoteEngine
    from gym_serve.engines.worker import WorkerSettings

    return RemoteEngine(
        WorkerSettings(
            folder=str(model.folder),
            dtype=settings.dtype,
            device=settings.device,
            max_slots=settings.max_batch_size,
            num_threads=settings.num_threads or None,
        )
    )


def find_factory(kind: str) -> EngineFactory:
    """The engine of a name: an entry point of the group `gym.engines`, or `module:function`."""
    points = importlib.metadata.entry_points(group="gym.engines")
    if kind in points.names:
        return points[kind].load()
    module, _, attribute = kind.partition(":")
    if attribute:
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UserError(f"the engine {kind} cannot be imported: {error}") from None
    raise UserError(f"there is no engine '{kind}'", hint=f"engine.kind is one of {', '.join(sorted(points.names))}")


def _log_progress() -> Callable[[str, int, int | None, str], None]:
    last = 0.0

    def report(stage: str, done: int, total: int | None, unit: str) -> None:
        nonlocal last
        if time.monotonic() - last >= 5.0 or done == 0:
            last = time.monotonic()
            logger.info("%s: %s%s %s", stage, done, f"/{total}" if total else "", unit)

    return report
