"""Money: what was spent, what is reserved, and hard caps that no call can pass."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gym_sdk.errors import GymError
from gym_sdk.spec.training_free import BudgetSpec, CapsSpec, PriceSpec

Purpose = Literal["training", "evaluation"]
PURPOSES: tuple[Purpose, ...] = ("training", "evaluation")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of one answered call, as the endpoint counts them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt's tokens, those that the endpoint had cached."""

    estimated: bool = False
    """The endpoint reported no usage; these are the upper bounds that were reserved."""

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def cost_usd(price: PriceSpec | None, usage: Usage) -> float:
    """What a call costs at a price table; nothing without one."""
    if price is None:
        return 0.0
    cached_price = price.cached_input_usd_per_million
    cached = usage.cached_tokens if cached_price is not None else 0
    return (
        (usage.prompt_tokens - cached) * price.input_usd_per_million
        + cached * (cached_price or 0.0)
        + usage.completion_tokens * price.output_usd_per_million
    ) / 1e6


def bound_prompt_tokens(messages: list[dict[str, Any]]) -> int:
    """More tokens than a prompt can have: one a UTF-8 byte, and what a chat template adds around each message."""
    return 64 + sum(32 + len(str(message.get("content", "")).encode()) for message in messages)


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """What one attempt may cost at most."""

    tokens: int
    cost_usd: float


@dataclass
class Spending:
    """What one purpose has used up."""

    calls: int = 0
    """Attempts, failed ones included."""

    answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0
    lost_calls: int = 0
    """Attempts without an answer that may have been charged: time-outs, broken connections, kills."""

    lost_tokens: int = 0
    lost_usd: float = 0.0
    """Their upper bound; it counts against the caps."""

    busy_s: float = 0.0
    """Time in which at least one call was under way."""

    reserved: dict[int, Reservation] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, float]:
        """The figures, without what is under way."""
        return {key: value for key, value in asdict(self).items() if key != "reserved"}


class BudgetExhausted(GymError):
    """A hard cap leaves no room for another call. What was accepted so far is kept."""

    def __init__(self, purpose: Purpose, limit: str) -> None:
        super().__init__(
            f"the {purpose} budget is used up: {limit}",
            hint=f"raise method.budget.{purpose}.{limit.split()[0]} in the run's spec.yaml and resume it",
        )
        self.purpose: Purpose = purpose
        self.limit = limit


class Budget:
    """Reserves before a call, settles after it. A call that does not fit waits for those under way, then is refused."""

    def __init__(self, spec: BudgetSpec) -> None:
        self.caps: dict[Purpose, CapsSpec] = {"training": spec.training, "evaluation": spec.evaluation}
        self.spent: dict[Purpose, Spending] = {purpose: Spending() for purpose in PURPOSES}
        self._changed = asyncio.Condition()
        self._next_id = 0

    async def reserve(self, purpose: Purpose, reservation: Reservation) -> int:
        """Set an attempt's upper bound aside. Raises BudgetExhausted when no settlement can make room."""
        spent = self.spent[purpose]
        async with self._changed:
            while (limit := self._passes(purpose, reservation)) is not None:
                if not spent.reserved or limit.startswith("calls"):
                    raise BudgetExhausted(purpose, limit)
                await self._changed.wait()
            self._next_id += 1
            spent.reserved[self._next_id] = reservation
            spent.calls += 1
            return self._next_id

    async def settle(self, purpose: Purpose, ticket: int, usage: Usage | None, cost: float, *, lost: bool) -> None:
        """Replace a reservation by what happened: an answer's usage, nothing (refused), or the bound (lost)."""
        spent = self.spent[purpose]
        async with self._changed:
            reservation = spent.reserved.pop(ticket)
            if usage is not None:
                self.count_answer(purpose, usage, cost)
            elif lost:
                self.count_lost(purpose, reservation)
            self._changed.notify_all()

    def count_answer(self, purpose: Purpose, usage: Usage, cost: float) -> None:
        spent = self.spent[purpose]
        spent.answers += 1
        spent.prompt_tokens += usage.prompt_tokens
        spent.completion_tokens += usage.completion_tokens
        spent.cached_tokens += usage.cached_tokens
        spent.cost_usd += cost

    def count_lost(self, purpose: Purpose, reservation: Reservation) -> None:
        spent = self.spent[purpose]
        spent.lost_calls += 1
        spent.lost_tokens += reservation.tokens
        spent.lost_usd += reservation.cost_usd

    def remaining_s(self, purpose: Purpose) -> float | None:
        """The time left under the cap; None without one."""
        seconds = self.caps[purpose].seconds
        return None if seconds is None else max(0.0, seconds - self.spent[purpose].busy_s)

    def _passes(self, purpose: Purpose, more: Reservation) -> str | None:
        """Which cap one more attempt could pass, in words."""
        caps, spent = self.caps[purpose], self.spent[purpose]
        under_way = list(spent.reserved.values())
        if caps.calls is not None and spent.calls + 1 > caps.calls:
            return f"calls ({spent.calls} of {caps.calls} made)"
        if caps.seconds is not None and spent.busy_s >= caps.seconds:
            return f"seconds ({spent.busy_s:.0f} of {caps.seconds:g} passed)"
        if caps.tokens is not None:
            used = spent.prompt_tokens + spent.completion_tokens + spent.lost_tokens
            if used + sum(r.tokens for r in under_way) + more.tokens > caps.tokens:
                return f"tokens ({used} of {caps.tokens} used, the next call may need {more.tokens})"
        if caps.cost_usd is not None:
            used_usd = spent.cost_usd + spent.lost_usd
            if used_usd + sum(r.cost_usd for r in under_way) + more.cost_usd > caps.cost_usd + 1e-12:
                return (
                    f"cost_usd ({used_usd:.4f} of {caps.cost_usd:g} spent, the next call may cost {more.cost_usd:.4f})"
                )
        return None
