"""Who runs in the next step.

First come, first served. Decoding requests stand in slots 0..n-1 and always take part; prompts follow, in the order
of their slots, as far as the step's token budget reaches. A prompt whose beginning was read before takes that over;
one whose beginning is just being read waits for the step to end and takes it over then. When keys and values outgrow
their memory, the youngest request gives up its slot and later starts again from its prompt and what it has generated
(nothing is lost but time).
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gym_serve.engines.base import GenerationRequest, TokenStream
from gym_serve.engines.prefixes import LEAST_TOKENS, PrefixStore, num_shared

if TYPE_CHECKING:
    from gym_serve.engines.grammar import GrammarMatcher
    from gym_serve.engines.sampling import RowSampler
    from gym_serve.engines.slots import SlotCache


LEAST_TOKENS_TO_WAIT = 64
"""A step's wait is worth so many tokens that need not be read twice."""


@dataclass(kw_only=True, eq=False)
class Running:
    """A request on its way, with all that it needs to go on."""

    request: GenerationRequest
    stream: TokenStream
    sampler: RowSampler
    matcher: GrammarMatcher | None
    max_tokens: int
    arrival: int = field(default_factory=itertools.count().__next__)
    ids: list[int] = field(default_factory=list)
    """The prompt and what has been generated."""
    length: int = 0
    """How many of the ids are in the cache. One less than all of them while it decodes."""
    num_generated: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that were taken over from other requests before the first token was drawn."""

    def __post_init__(self) -> None:
        self.ids = list(self.request.prompt_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def decodes(self) -> bool:
        """Whether only its newest token is missing from the cache."""
        return self.num_generated > 0 and self.length == len(self.ids) - 1

    def append(self, token_id: int) -> None:
        self.ids.append(token_id)
        self.num_generated += 1


@dataclass(frozen=True, slots=True)
class Row:
    """A request's part of a step."""

    running: Running
    slot: int
    start: int
    ids: list[int]
    decodes: bool
    completes: bool
    """Whether the step reaches its newest token, so that the next one can be drawn."""


@dataclass(kw_only=True)
class StepPlan:
    """The rows of a step: decoding ones first."""

    rows: list[Row]
    num_decoding: int
    num_prompt_tokens: int


class Scheduler:
    """The slots and the queue. `running[s]` is the request in slot s."""

    def __init__(
        self, cache: SlotCache, *, max_slots: int, step_tokens: int, prefixes: PrefixStore | None = None
    ) -> None:
        self.running: list[Running] = []
        self.waiting: deque[Running] = deque()
        self.num_preemptions: int = 0
        self.num_reused_tokens: int = 0
        """Positions that were taken over from other requests."""
        self._prefixes = prefixes
        self._cache = cache
        self._max_slots = max_slots
        self._step_tokens = step_tokens
        self._num_decoding = 0

    def remove(self, running: Running) -> None:
        """Take a request out, wherever it is; its slot is filled from the end, so that slots stay without gaps."""
        if running not in self.running:
            if running in self.waiting:
                self.waiting.remove(running)
            return
        hole = self.running.index(running)
        if hole < self._num_decoding:
            self._num_decoding -= 1
            self._fill(hole, self._num_decoding)
            hole = self._num_decoding
        self._fill(hole, len(self.running) - 1)
        self.running.pop()

    def _fill(self, hole: int, source: int) -> None:
        if hole != source:
            moved = self.running[source]
            self._cache.move(source, hole, moved.length)
            self.running[hole] = moved

    def remember(self, running: Running) -> None:
        """Keep what a request that ends has in the cache. Called before `remove`."""
        if self._prefixes is not None and running in self.running:
            slot = self.running.index(running)
            self._prefixes.remember(slot, running.request.adapter, running.ids[: running.length])

    def plan(self) -> StepPlan:
        """Choose the rows of the next step and make room for them."""
        self._make_room()
        budget = self._step_tokens
        rows: list[Row] = []
        for slot in range(self._num_decoding):
            running = self.running[slot]
            rows.append(Row(running, slot, running.length, running.ids[-1:], True, True))
            running.length += 1
        slot = self._num_decoding
        while budget > 0:
            if slot == len(self.running) and not self._admit():
                break
            running = self.running[slot]
            if running.length == 0 and self._prefixes is not None and not self._take_over(slot, running, rows):
                break
            todo = len(running.ids) - running.length
            take = min(todo, budget)
            if not self._reserve(slot + 1, running.length + take):
                break  # wait until others have ended; alone, a request always fits (the context is no larger)
            piece = running.ids[running.length : running.length + take]
            rows.append(Row(running, slot, running.length, piece, False, take == todo))
            running.length += take
            budget -= take
            if take == todo:
                self._num_decoding += 1  # from the next step on: prompts are finished in the order of slots
            slot += 1
        num_decoding = sum(row.decodes for row in rows)
        return StepPlan(
            rows=rows,
            num_decoding=num_decoding,
            num_prompt_tokens=sum(len(row.ids) for row in rows[num_decoding:]),
        )

    def _take_over(self, slot: int, running: Running, rows: list[Row]) -> bool:
        """Copy the longest beginning that is in memory into a request's slot. False when it should wait a step, because
        much more of its beginning is being read in this one."""
        assert self._prefixes is not None
        # The last one is read in any case: its logits are needed.
        adapter, ids = running.request.adapter, running.ids[:-1]
        self._count_cached(running, 0)
        started = {row.slot: row.start for row in rows}
        prefix, length = self._prefixes.find(adapter, ids)
        source: int | None = None
        promised = 0
        for other, each in enumerate(self.running[:slot]):
            if each.request.adapter != adapter:
                continue
            shared = num_shared(each.ids, ids)
            in_memory = min(shared, started.get(other, each.length))
            if in_memory > length:
                source, length = other, in_memory
            if other in started:
                promised = max(promised, shared)
        if promised - length >= LEAST_TOKENS_TO_WAIT:
            return False
        if length < LEAST_TOKENS or not self._reserve(slot + 1, length + 1):
            return True
        if source is not None:
            self._cache.move(source, slot, length)
        elif prefix is not None:
            self._prefixes.restore(prefix, length, slot)
        running.length = length
        self.num_reused_tokens += length
        self._count_cached(running, length)
        return True

    @staticmethod
    def _count_cached(running: Running, length: int) -> None:
        # A request that gave way later takes its own tokens over again: that is no one's saving.
        if running.num_generated == 0:
            running.num_cached_tokens = length

    def _admit(self) -> bool:
        """Give the oldest waiting request a slot, if there is one and memory for its next tokens."""
        if not self.waiting or len(self.running) == self._max_slots:
            return False
        candidate = self.waiting[0]
        if self.running and not self._reserve(len(self.running) + 1, max(self._longest(), len(candidate.ids)) + 1):
            return False
        self.running.append(self.waiting.popleft())
        return True

    def _make_room(self) -> None:
        """Room for one more token of every decoding request; the youngest requests give way where there is none."""
        while len(self.running) > 1 and not self._reserve(len(self.running), self._longest() + 1):
            youngest = max(self.running, key=lambda running: running.arrival)
            self.remove(youngest)
            youngest.length = 0
            self.waiting.appendleft(youngest)
            self.num_preemptions += 1
        self._reserve(len(self.running), self._longest() + 1)

    def _longest(self) -> int:
        return max((running.length for running in self.running), default=0)

    def _reserve(self, num_slots: int, length: int) -> bool:
        return self._cache.reserve(max(num_slots, len(self.running)), max(length, self._longest()))
