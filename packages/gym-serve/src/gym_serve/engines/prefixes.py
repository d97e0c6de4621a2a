"""The keys and values of prompts that were read before, so that the beginning of a new one need not be read again.

The turns of a chat begin with all that was said before; chats with one system message, or one library of experiences,
begin with that. What a request has in the cache when it ends is copied out and kept, the least recently used given up
first. A new request takes the longest beginning that it shares with one of these or with a running request. Adapters
change keys and values, so nothing is shared between them.

What is reused was computed in another batch: equal up to the rounding of a batched sum, as `Engine` promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gym_serve.engines.slots import SlotCache

LEAST_TOKENS = 16
"""A shorter beginning is read as fast as it is found and copied."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefix:
    """A text that was read, by its ids, with the keys and values [K, L, D] of each layer."""

    adapter: str | None
    ids: list[int]
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]]


class PrefixStore:
    """What is kept of ended requests, within a budget of positions."""

    def __init__(self, cache: SlotCache, *, max_tokens: int) -> None:
        self._cache = cache
        self._max_tokens = max_tokens
        self._kept: list[Prefix] = []
        """The least recently used first."""

    @property
    def num_tokens(self) -> int:
        """Positions in use."""
        return sum(len(prefix.ids) for prefix in self._kept)

    def find(self, adapter: str | None, ids: Sequence[int]) -> tuple[Prefix | None, int]:
        """The kept text that shares the longest beginning with `ids`, and how long that is."""
        best, length = None, 0
        for prefix in self._kept:
            if prefix.adapter == adapter and (shared := num_shared(prefix.ids, ids)) > length:
                best, length = prefix, shared
        return best, length

    def restore(self, prefix: Prefix, length: int, slot: int) -> None:
        """Copy the beginning of a kept text into a slot."""
        self._cache.write(slot, prefix.layers, length)
        self._kept.remove(prefix)
        self._kept.append(prefix)

    def remember(self, slot: int, adapter: str | None, ids: Sequence[int]) -> None:
        """Keep what a slot holds, unless it is kept already; a kept text that it only continues is replaced."""
        if not LEAST_TOKENS <= len(ids) <= self._max_tokens:
            return
        found, shared = self.find(adapter, ids)
        if found is not None and shared == len(ids):
            self._kept.remove(found)
            self._kept.append(found)
            return
        if found is not None and shared == len(found.ids):
            self._kept.remove(found)
        while self._kept and self.num_tokens + len(ids) > self._max_tokens:
            self._kept.pop(0)
        layers = self._cache.read(slot, len(ids))
        self._kept.append(Prefix(adapter=adapter, ids=list(ids), layers=layers))


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the beginning that two texts share."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # halving, so that comparing is left to slices
        middle = (low + high + 1) // 2
        if list(one[low:middle]) == list(other[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
