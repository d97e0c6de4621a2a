"""The embedded engine: continuous batching of a transformers model by slots, base and adapters together.

Each step runs the model once, on one packed row: the next token of every decoding request, then as many prompt tokens
as the step's budget allows. Requests join and leave between steps. See `slot_model` for the model's part of a step,
`slots` for the cache and attention, `lora` for adapters, `sampling` for how tokens are drawn, and `scheduler` for who
gets a slot.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gym_sdk.errors import GymError
from gym_serve.engines.base import (
    EngineError,
    EngineStats,
    Finish,
    GenerationRequest,
    PromptRead,
    RequestRefused,
    StreamItem,
    Token,
    TokenStream,
    check_adapter,
    check_request,
)
from gym_serve.engines.grammar import GrammarCompiler, GrammarMatcher
from gym_serve.engines.lora import AdapterBank
from gym_serve.engines.prefixes import PrefixStore
from gym_serve.engines.sampling import RowSampler, sample
from gym_serve.engines.scheduler import Running, Scheduler
from gym_serve.engines.slot_model import SlotModel, free_bytes
from gym_serve.engines.slots import GROWTH_TOKENS, SlotCache

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

_logger = logging.getLogger(__name__)

DEFAULT_MAX_SLOTS = 16
DEFAULT_STEP_TOKENS = 512
"""Prompt tokens a step: what a prompt of another request can delay the next token by."""


class TransformersEngine:
    """An `Engine` on a loaded transformers model, on a processor or one GPU, run by a thread of its own.

    The model is used in place, in evaluation mode, and given back as it was by `close`. A peft model may be given too:
    its active adapter then acts on every request.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *,
        max_slots: int = DEFAULT_MAX_SLOTS,
        step_tokens: int = DEFAULT_STEP_TOKENS,
        context_length: int | None = None,
        kv_cache_bytes: int | None = None,
        tokenizer_json: Path | None = None,
        pack_weights: bool = False,
        prefix_share: float = 0.0,
    ) -> None:
        """Args:
            model: a causal language model whose attention layers are standard ones.
            max_slots: the most requests that run at once.
            step_tokens: the most prompt tokens in a step.
            context_length: at most the model's own, which is the default.
            kv_cache_bytes: the most memory of keys and values; 40% of what is free when not given.
            tokenizer_json: the model's tokenizer, which requests with a grammar need.
            pack_weights: on a processor, keep a second copy of the weights that batches are multiplied faster with (see
                `packed`); for a model that does not change.
            prefix_share: the share of that memory that keeps what was read before (see `prefixes`); for a model that
                does not change.

        Raises:
            ModelError: the model's attention cannot be run by slots.
        """
        self._slots = SlotModel(model, pack_weights=pack_weights)
        self._grammars = GrammarCompiler(tokenizer_json, self.vocab_size) if tokenizer_json else None
        budget = kv_cache_bytes if kv_cache_bytes is not None else int(0.4 * free_bytes(self._slots.device))
        num_positions = budget // self._slots.bytes_per_position
        num_kept = int(prefix_share * num_positions)
        max_tokens = max(num_positions - num_kept, GROWTH_TOKENS)
        self._context_length = min(context_length or 2**31, self._slots.max_positions, max_tokens)
        self._cache = SlotCache(max_slots=max_slots, max_tokens=max_tokens)
        prefixes = PrefixStore(self._cache, max_tokens=num_kept) if num_kept else None
        self._bank = AdapterBank(self._slots.base)
        self._scheduler = Scheduler(self._cache, max_slots=max_slots, step_tokens=step_tokens, prefixes=prefixes)
        self._counts = {"prompt": 0, "generated": 0, "steps": 0}
        self._pinned: dict[str, int] = {}
        """Requests that hold an adapter, by content id."""
        self._unloading: set[str] = set()

        self._changed = threading.Condition()
        self._arrived: list[Running] = []
        self._aborted: set[str] = set()
        self._calls: list[tuple[Callable[[], object], Future[object]]] = []
        self._closing = False
        self._failed: EngineError | None = None
        self._thread = threading.Thread(target=self._run, name="gym-engine", daemon=True)
        self._thread.start()

    # What callers see, from any thread

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def vocab_size(self) -> int:
        return self._slots.vocab_size

    @property
    def adapters(self) -> frozenset[str]:
        with self._changed:
            return self._bank.content_ids - self._unloading

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Queue a request. See `Engine.submit`."""
        check_request(request, context_length=self._context_length, vocab_size=self.vocab_size)
        stream = TokenStream(request, self.abort)
        running = Running(
            request=request,
            stream=stream,
            sampler=RowSampler(request.sampling, request.prompt_ids, self._slots.device),
            matcher=self._matcher(request),
            max_tokens=min(request.max_tokens or 2**31, self._context_length - len(request.prompt_ids)),
        )
        with self._changed:
            if self._failed is not None:
                raise self._failed
            if self._closing:
                raise EngineError("the engine is closed")
            check_adapter(request.adapter, self._bank.content_ids - self._unloading)
            if request.adapter is not None:
                self._pinned[request.adapter] = self._pinned.get(request.adapter, 0) + 1
            self._arrived.append(running)
            self._changed.notify_all()
        return stream

    @property
    def has_failed(self) -> bool:
        """Whether a step failed for good: every request has ended with an error, and none is taken."""
        return self._failed is not None

    def abort(self, request_id: str) -> None:
        """End a request within a step. See `Engine.abort`."""
        with self._changed:
            self._aborted.add(request_id)
            self._changed.notify_all()

    def load_adapter(self, folder: Path) -> str:
        """Load an adapter. See `Engine.load_adapter`."""
        adapter = self._bank.read(folder)

        def add() -> None:
            with self._changed:
                self._unloading.discard(adapter.content_id)
                if adapter.content_id not in self._bank.content_ids:
                    self._bank.add(adapter)

        self._call(add)
        return adapter.content_id

    def unload_adapter(self, adapter: str) -> None:
        """Forget an adapter when its last request ends. See `Engine.unload_adapter`."""

        def remove() -> None:
            with self._changed:  # no request may pin it between the question and the answer
                if self._pinned.get(adapter):
                    self._unloading.add(adapter)
                else:
                    self._bank.remove(adapter)

        self._call(remove)

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        with self._changed:
            arrived = len(self._arrived)
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + arrived,
            kv_used_tokens=sum(running.length for running in list(scheduler.running)),
            kv_capacity_tokens=self._cache.max_tokens,
            num_prompt_tokens=self._counts["prompt"],
            num_generated_tokens=self._counts["generated"],
            num_steps=self._counts["steps"],
            num_preemptions=scheduler.num_preemptions,
            num_reused_tokens=scheduler.num_reused_tokens,
        )

    def close(self) -> None:
        """End every stream and give the model back. See `Engine.close`."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._bank.close()
        self._slots.close()

    def __enter__(self) -> TransformersEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _matcher(self, request: GenerationRequest) -> GrammarMatcher | None:
        if request.grammar is None:
            return None
        if self._grammars is None:
            raise RequestRefused("this engine has no tokenizer, which grammars need")
        return self._grammars.matcher(request.grammar, request.stop_ids)

    # The engine's thread

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                with self._changed:
                    self._changed.wait_for(self._has_work)
                    arrived, self._arrived = self._arrived, []
                    aborted, self._aborted = self._aborted, set()
                    calls, self._calls = self._calls, []
                    closing = self._closing
                self._scheduler.waiting.extend(arrived)
                for call, result in calls:
                    _answer(call, result)
                for running in [*self._scheduler.running, *self._scheduler.waiting]:
                    if closing or running.request.id in aborted:
                        self._finish(running, Finish("abort", running.num_prompt_tokens, running.num_generated))
                if closing:
                    return
                try:
                    self._step()
                except Exception as error:
                    _logger.exception("engine step failed")
                    self._fail(error)
                    if isinstance(error, GymError) or not isinstance(error, torch.OutOfMemoryError):
                        return

    def _has_work(self) -> bool:
        scheduler = self._scheduler
        return bool(
            self._arrived or self._calls or self._closing or self._aborted or scheduler.running or scheduler.waiting
        )

    def _step(self) -> None:
        plan = self._scheduler.plan()
        if not plan.rows:
            return
        logits_NV = self._slots.forward(plan, self._cache, self._bank)
        sampled = [row.running for row in plan.rows if row.completes]
        self._counts["steps"] += 1
        self._counts["prompt"] += plan.num_prompt_tokens
        if not sampled:
            return
        tokens = sample(
            logits_NV.float(),
            [running.sampler for running in sampled],
            [running.request.top_logprobs for running in sampled],
            self._allowed(sampled),
        )
        self._counts["generated"] += len(tokens)
        for running, token in zip(sampled, tokens, strict=True):
            self._deliver(running, token)

    def _allowed(self, sampled: list[Running]) -> torch.Tensor | None:
        """[N, V] what grammars allow; None when no row has one."""
        if all(running.matcher is None for running in sampled):
            return None
        allowed_NV = torch.ones(len(sampled), self.vocab_size, dtype=torch.bool)
        for i, running in enumerate(sampled):
            if running.matcher is not None:
                allowed_NV[i] = running.matcher.allowed()
        return allowed_NV.to(self._slots.device)

    def _deliver(self, running: Running, token: Token) -> None:
        is_first = running.num_generated == 0 and running.num_cached_tokens
        items: list[StreamItem] = [PromptRead(running.num_cached_tokens), token] if is_first else [token]
        running.append(token.id)
        request = running.request
        reason = None
        if running.matcher is not None and token.id not in request.stop_ids:
            try:
                running.matcher.consume(token.id)
            except RequestRefused as error:  # a limit of the grammar library: this answer's end, and no one else's
                self._finish(running, error)
                return
        if token.id in request.stop_ids or (running.matcher is not None and running.matcher.is_complete):
            reason = "stop"
        elif running.num_generated >= running.max_tokens:
            reason = "length"
        if reason is None:
            running.stream.put(items)
            return
        self._finish(running, *items, Finish(reason, running.num_prompt_tokens, running.num_generated))

    def _finish(self, running: Running, *items: StreamItem) -> None:
        if not isinstance(items[-1], GymError):
            self._scheduler.remember(running)
        self._scheduler.remove(running)
        adapter = running.request.adapter
        if adapter is not None:
            with self._changed:
                self._pinned[adapter] -= 1
                if not self._pinned[adapter]:
                    del self._pinned[adapter]
                    if adapter in self._unloading:
                        self._unloading.discard(adapter)
                        self._bank.remove(adapter)
        running.stream.put(items)

    def _fail(self, error: Exception) -> None:
        """End every request with the error. Out of memory is survived; anything else is not."""
        kind = "ran out of memory" if isinstance(error, torch.OutOfMemoryError) else f"failed: {error}"
        failure = EngineError(f"the engine {kind}", hint="send the request again")
        fatal = not isinstance(error, torch.OutOfMemoryError)
        with self._changed:
            if fatal:
                self._failed = failure
            arrived, self._arrived = self._arrived, []
            calls, self._calls = self._calls, []
        self._scheduler.waiting.extend(arrived)
        for running in [*self._scheduler.running, *self._scheduler.waiting]:
            self._finish(running, failure)
        for _, result in calls:
            result.set_exception(failure)

    def _call(self, call: Callable[[], object]) -> None:
        """Run something between two steps, in the engine's thread, and wait for it."""
        result: Future[object] = Future()
        with self._changed:
            if self._failed is not None:
                raise self._failed
            if self._closing:
                raise EngineError("the engine is closed")
            self._calls.append((call, result))
            self._changed.notify_all()
        result.result()


def _answer(call: Callable[[], object], result: Future[object]) -> None:
    try:
        result.set_result(call())
    except Exception as error:  # noqa: BLE001  (belongs to the caller)
        result.set_exception(error)
