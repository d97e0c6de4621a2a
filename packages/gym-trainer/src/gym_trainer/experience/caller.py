"""Calls that are paid once: journal, budget and endpoint behind one function."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from gym_sdk.errors import GymError, RunFailed
from gym_sdk.spec.training_free import SamplingSpec
from gym_trainer.experience.budget import (
    Budget,
    BudgetExhausted,
    Purpose,
    Reservation,
    Usage,
    bound_prompt_tokens,
    cost_usd,
)
from gym_trainer.experience.client import Attempts, CallFailed, ChatEndpoint
from gym_trainer.experience.journal import Journal, request_key
from gym_trainer.experience.limits import Clock

MAX_FAILURES_IN_A_ROW = 8
"""Calls given up on, without an answer between them, after which the endpoint counts as down."""

Message = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model said. `key` finds the request in the journal."""

    key: str
    text: str
    finish_reason: str
    completion_tokens: int


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A call that has no answer, and never a reward."""

    key: str
    why: str


class ReplayMiss(GymError):
    """A replay needs an answer that the journal does not hold."""


class Caller:
    """Answers from the journal, or from the endpoint within the budget."""

    def __init__(
        self,
        *,
        journal: Journal,
        budget: Budget,
        endpoints: dict[str, ChatEndpoint],
        seed: int,
        replay: bool = False,
        on_call: Callable[[], None] = lambda: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.journal: Journal = journal
        self.budget: Budget = budget
        self.seed: int = seed
        self._endpoints, self._replay, self._on_call, self._clock = endpoints, replay, on_call, clock
        self._failures: dict[str, str] = {}
        self._failures_in_a_row = 0
        self.stopped: GymError | None = None
        """What ended the run; no further attempt is made."""

        self._busy: dict[Purpose, tuple[int, float]] = {"training": (0, 0.0), "evaluation": (0, 0.0)}
        self._pending: dict[str, asyncio.Future[Answer | Dropped]] = {}
        self._capped = _restore(journal, budget)

    async def ask(
        self, role: str, messages: Sequence[Message], sampling: SamplingSpec, *, draw: str, purpose: Purpose
    ) -> Answer | Dropped:
        """The model's answer; equal requests of one draw are made once.

        Raises BudgetExhausted, EndpointError, ReplayMiss, and RunFailed when the endpoint keeps failing.
        """
        endpoint = self._endpoints[role]
        body = self._body(endpoint, list(messages), sampling, draw)
        key = request_key(role, body, draw)
        # Pending first: the journal knows an answer a moment before it is durable.
        if (pending := self._pending.get(key)) is not None:
            return await asyncio.shield(pending)
        if (entry := self.journal.answers.get(key)) is not None:
            return _answer(entry)
        if (entry := self.journal.dropped.get(key)) is not None:
            return Dropped(key=key, why=entry["why"])
        if (limit := self._capped.get(purpose)) is not None:
            raise BudgetExhausted(purpose, limit)
        if self._replay:
            raise ReplayMiss(f"the journal holds no answer for a request of draw {draw!r}")
        if self.stopped is not None:
            raise self.stopped
        future: asyncio.Future[Answer | Dropped] = asyncio.get_running_loop().create_future()
        self._pending[key] = future
        try:
            result = await self._call(endpoint, key, body, draw, purpose)
            future.set_result(result)
            return result
        except BaseException as error:
            if isinstance(error, GymError):
                # A used-up budget ends its own purpose only; everything else ends the run.
                self.stopped = self.stopped if isinstance(error, BudgetExhausted) else error
                future.set_exception(error)
                future.exception()  # Marked as seen: there may be nobody else waiting.
            else:
                future.cancel()
            raise
        finally:
            del self._pending[key]

    async def settle_failures(self) -> int:
        """Make the calls given up on since the last time final, so that a resumed run does not try them again.

        Called at the end of a phase: a run that is killed before that tries them again. Returns how many there were.
        """
        count = len(self._failures)
        for key, why in sorted(self._failures.items()):
            await self.journal.append({"type": "dropped", "key": key, "why": why})
        self._failures.clear()
        return count

    def model(self, role: str) -> str:
        """The name of a role's model."""
        return self._endpoints[role].model

    async def close(self) -> None:
        for endpoint in {id(e): e for e in self._endpoints.values()}.values():
            await endpoint.close()
        await self.journal.close()

    def _body(
        self, endpoint: ChatEndpoint, messages: list[Message], sampling: SamplingSpec, draw: str
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": endpoint.model,
            "messages": messages,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            **endpoint.spec.extra_body,
        }
        if sampling.top_p is not None:
            body["top_p"] = sampling.top_p
        if endpoint.spec.send_seed:
            digest = hashlib.sha256(f"{self.seed}\0{draw}\0{messages[-1]['content']}".encode()).digest()
            body["seed"] = int.from_bytes(digest[:4], "big") >> 1
        return body

    async def _call(
        self, endpoint: ChatEndpoint, key: str, body: dict[str, Any], draw: str, purpose: Purpose
    ) -> Answer | Dropped:
        price = endpoint.spec.price
        prompt_bound, output_bound = bound_prompt_tokens(body["messages"]), int(body["max_tokens"])
        bound = Usage(prompt_tokens=prompt_bound, completion_tokens=output_bound, estimated=True)
        reservation = Reservation(tokens=bound.total, cost_usd=cost_usd(price, bound))
        attempts = _Attempts(self, key, endpoint.role, body, draw, purpose, reservation)
        try:
            reply = await endpoint.complete(body, tokens=prompt_bound / 4 + output_bound, attempts=attempts)
        except CallFailed as error:
            self._failures[key] = str(error)
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
                raise RunFailed(
                    f"the {endpoint.role} endpoint failed {self._failures_in_a_row} calls in a row; the last: {error}",
                    hint=f"{error.hint or 'wait until it works again'}; then resume the run: nothing is paid twice",
                ) from None
            return Dropped(key=key, why=str(error))
        except BudgetExhausted as error:
            await self._note_cap(error)
            # Many calls meet a cap at once; all report the first, as the journal does.
            raise BudgetExhausted(purpose, self._capped[purpose]) from None
        self._failures_in_a_row = 0
        usage = reply.usage or bound
        cost = cost_usd(price, usage)
        await attempts.settle(usage, cost)
        entry = {
            "type": "answer",
            "key": key,
            "purpose": purpose,
            "text": reply.text,
            "finish_reason": reply.finish_reason,
            "usage": asdict(usage),
            "cost_usd": cost,
            "busy_s": self.busy_s(purpose),
        }
        await self.journal.append(entry)
        self._on_call()
        return _answer(entry)

    async def _note_cap(self, error: BudgetExhausted) -> None:
        if error.purpose not in self._capped:
            self._capped[error.purpose] = error.limit
            caps = self.budget.caps[error.purpose].model_dump()
            await self.journal.append({"type": "cap", "purpose": error.purpose, "limit": error.limit, "caps": caps})

    def busy_s(self, purpose: Purpose) -> float:
        """The busy time as the journal records it, so that a replay counts the same."""
        spent = self.budget.spent[purpose]
        spent.busy_s = round(spent.busy_s, 3)
        return spent.busy_s

    def enter(self, purpose: Purpose) -> None:
        """A call begins: the purpose is busy until as many have left."""
        count, since = self._busy[purpose]
        self._busy[purpose] = (count + 1, self._clock() if count == 0 else since)

    def leave(self, purpose: Purpose) -> None:
        """A call has ended."""
        self.tick(purpose)
        count, since = self._busy[purpose]
        self._busy[purpose] = (count - 1, since)

    def tick(self, purpose: Purpose) -> None:
        """Bring the busy time up to now."""
        count, since = self._busy[purpose]
        if count:
            now = self._clock()
            self.budget.spent[purpose].busy_s += now - since
            self._busy[purpose] = (count, now)


class _Attempts(Attempts):
    """Reserves and settles the attempts of one call."""

    def __init__(
        self,
        caller: Caller,
        key: str,
        role: str,
        body: dict[str, Any],
        draw: str,
        purpose: Purpose,
        reservation: Reservation,
    ) -> None:
        self._caller, self._key, self._reservation = caller, key, reservation
        self._purpose: Purpose = purpose
        self._request = {"role": role, "draw": draw, "body": body}
        self._ticket = 0

    async def begin(self) -> float | None:
        caller = self._caller
        if caller.stopped is not None:
            raise caller.stopped
        caller.tick(self._purpose)
        self._ticket = await caller.budget.reserve(self._purpose, self._reservation)
        caller.enter(self._purpose)
        entry = {"type": "request", "key": self._key, "purpose": self._purpose, "reserved": asdict(self._reservation)}
        caller.journal.note({**entry, **self._request})
        self._request = {}  # The body stands in the journal once; a retry refers to it by key.
        return caller.budget.remaining_s(self._purpose)

    async def refused(self) -> None:
        self._caller.leave(self._purpose)
        await self._caller.budget.settle(self._purpose, self._ticket, None, 0.0, lost=False)
        self._note("refused")

    async def lost(self, why: str) -> None:
        self._caller.leave(self._purpose)
        await self._caller.budget.settle(self._purpose, self._ticket, None, 0.0, lost=True)
        self._note("lost", why=why)

    def _note(self, kind: str, **more: str) -> None:
        busy_s = self._caller.busy_s(self._purpose)
        entry = {"type": kind, "key": self._key, "purpose": self._purpose, **more, "busy_s": busy_s}
        self._caller.journal.note(entry)

    async def settle(self, usage: Usage, cost: float) -> None:
        self._caller.leave(self._purpose)
        await self._caller.budget.settle(self._purpose, self._ticket, usage, cost, lost=False)


def _restore(journal: Journal, budget: Budget) -> dict[Purpose, str]:
    """Count what a journal says was spent; the caps that are in force still.

    A request without an outcome was under way when the run was killed: it may have been charged, and counts as lost.
    """
    open_requests: dict[str, tuple[Purpose, Reservation]] = {}
    capped: dict[Purpose, str] = {}
    for entry in journal.entries:
        kind = entry["type"]
        if kind == "request":
            purpose: Purpose = entry["purpose"]
            open_requests[entry["key"]] = (purpose, Reservation(**entry["reserved"]))
            budget.spent[purpose].calls += 1
        elif kind in ("answer", "lost", "refused"):
            purpose = entry["purpose"]
            opened = open_requests.pop(entry["key"], None)
            if kind == "answer":
                budget.count_answer(purpose, Usage(**entry["usage"]), entry["cost_usd"])
            elif kind == "lost" and opened is not None:
                budget.count_lost(*opened)
            if "busy_s" in entry:
                budget.spent[purpose].busy_s = max(budget.spent[purpose].busy_s, entry["busy_s"])
        elif kind == "cap" and entry["caps"] == budget.caps[entry["purpose"]].model_dump():
            capped[entry["purpose"]] = entry["limit"]
    for purpose, reservation in open_requests.values():
        budget.count_lost(purpose, reservation)
    return capped


def _answer(entry: dict[str, Any]) -> Answer:
    return Answer(
        key=entry["key"],
        text=entry["text"],
        finish_reason=entry["finish_reason"],
        completion_tokens=entry["usage"]["completion_tokens"],
    )


async def in_order(work: Iterable[Awaitable[T]]) -> list[T]:
    """Run everything at once; the results in the order of the work, whatever the order of completion.

    All of it is waited for, so that calls under way reach the journal; then the first error is raised.
    """
    results = await asyncio.gather(*work, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        # A cap is met by many calls; a real fault among them matters more.
        if not isinstance(error, BudgetExhausted):
            raise error
    if errors:
        raise errors[0]
    return [result for result in results if not isinstance(result, BaseException)]
