"""Keys and values of many requests at once, and attention over them.

A step runs the model on one row of packed tokens [1, T]: one token of each decoding request, then pieces of prompts. So
linear layers compute no padding, and a long prompt is read in pieces between the steps of the others. Requests live in
slots: slot s of every layer's cache holds one request's keys and values at positions 0..length. Decoding requests are
kept in slots 0..n-1, so that their caches are one view and need no copy.

Shapes: T packed tokens, R slots, H query heads, K key-value heads, G = H/K, D head dimension, C cached positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional

ATTENTION = "gym_slots"
"""The name under which transformers' attention interface finds `attend`."""

GROWTH_TOKENS = 256
"""Capacity grows in multiples of this many positions."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of one prompt in the packed row: tokens [begin, end) of the row are its positions from `start`."""

    slot: int
    begin: int
    end: int
    start: int


class SlotCache:
    """Keys and values [R, K, C, D] for each layer; made and grown on use."""

    def __init__(self, *, max_slots: int, max_tokens: int) -> None:
        self.max_slots: int = max_slots
        self.max_tokens: int = max_tokens
        """The budget: slots times positions."""
        self.num_slots: int = 0
        self.length: int = 0
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def measure(self) -> int:
        """The bytes of one position in all layers together, from what a first step has stored."""
        stores = [*self._keys.values(), *self._values.values()]
        return sum(cached.shape[1] * cached.shape[3] * cached.element_size() for cached in stores)

    def shape_for(self, num_slots: int, length: int) -> tuple[int, int] | None:
        """What to allocate so that `num_slots` requests of `length` positions fit; None beyond the budget."""
        most = self.max_tokens
        if num_slots <= self.num_slots and length <= self.length:
            return self.num_slots, self.length
        rounded = -(-length // GROWTH_TOKENS) * GROWTH_TOKENS
        if num_slots * rounded > most:
            rounded = length  # the last tokens of the budget are worth using
        if num_slots * rounded > most:
            return None
        return min(self.max_slots, max(num_slots, most // rounded)), rounded

    def reserve(self, num_slots: int, length: int) -> bool:
        """Make room; False when the budget has none. What the first `num_slots` slots hold is kept."""
        shape = self.shape_for(num_slots, length)
        if shape is None:
            return False
        if shape == (self.num_slots, self.length):
            return True
        kept_slots, kept_length = min(num_slots, self.num_slots), min(shape[1], self.length)
        for store in (self._keys, self._values):
            for layer, old in store.items():
                new = old.new_zeros(shape[0], old.shape[1], shape[1], old.shape[3])
                new[:kept_slots, :, :kept_length] = old[:kept_slots, :, :kept_length]
                store[layer] = new
        self.num_slots, self.length = shape
        return True

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot over another's."""
        for store in (self._keys, self._values):
            for cached in store.values():
                cached[target, :, :length] = cached[source, :, :length]

    def read(self, slot: int, length: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Copies of a slot's first `length` keys and values, by layer."""
        return {
            layer: (keys[slot, :, :length].clone(), self._values[layer][slot, :, :length].clone())
            for layer, keys in self._keys.items()
        }

    def write(self, slot: int, layers: dict[int, tuple[torch.Tensor, torch.Tensor]], length: int) -> None:
        """Put the first `length` of such copies into a slot."""
        for layer, (keys, values) in layers.items():
            self._keys[layer][slot, :, :length] = keys[:, :length]
            self._values[layer][slot, :, :length] = values[:, :length]

    def layer(self, index: int, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a layer; `key` [1, K, T, D] shows its shape the first time."""
        if index not in self._keys:
            # Zeros, not garbage: a masked position still meets a product, and 0 * NaN is NaN.
            self._keys[index] = key.new_zeros(self.num_slots, key.shape[1], self.length, key.shape[3])
            self._values[index] = torch.zeros_like(self._keys[index])
        return self._keys[index], self._values[index]


@dataclass(kw_only=True)
class StepLayout:
    """Where the tokens of one step come from and go to. Passed to the model's forward, through to `attend`."""

    cache: SlotCache
    num_decoding: int
    """Tokens [0, n) of the row are the next tokens of slots 0..n-1."""
    segments: list[Segment]
    slots_T: torch.Tensor
    positions_T: torch.Tensor
    longest: int
    """The positions that decoding requests may look at: the most tokens any of them has."""
    dtype: torch.dtype
    _masks: dict[object, torch.Tensor] = field(default_factory=dict)

    def decode_mask(self, window: int | None) -> torch.Tensor:
        """[n, 1, 1, C] 0 where a decoding request may look, the last `window` of its positions, else -inf."""
        key = ("decode", window)
        if key not in self._masks:
            positions_n1 = self.positions_T[: self.num_decoding, None]
            columns = torch.arange(self.longest, device=positions_n1.device)
            mask = columns <= positions_n1
            if window is not None:
                mask &= columns > positions_n1 - window
            self._masks[key] = self._added(mask[:, None, None])
        return self._masks[key]

    def prompt_mask(self, segment: Segment, window: int | None) -> torch.Tensor | None:
        """[L, C] for a piece of a prompt; None where plain causal attention over the piece alone says it all."""
        length = segment.end - segment.begin
        if segment.start == 0 and (window is None or window >= length):
            return None
        key = (segment, window)
        if key not in self._masks:
            device = self.positions_T.device
            rows = torch.arange(segment.start, segment.start + length, device=device)[:, None]
            columns = torch.arange(segment.start + length, device=device)
            mask = columns <= rows
            if window is not None:
                mask &= columns > rows - window
            self._masks[key] = self._added(mask)
        return self._masks[key]

    def _added(self, mask: torch.Tensor) -> torch.Tensor:
        """As numbers to add to scores, made once a step: every layer would turn a boolean mask into them again."""
        return torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, float("-inf"))


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    step_layout: StepLayout | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers' interface: write the new keys and values, look at each request's own.

    Args:
        query: [1, H, T, D]; `key` and `value` [1, K, T, D]; the returned output is [1, T, H, D].
        sliding_window: look back at most so far (Mistral, Gemma). `softcap`: squash scores (Gemma 2).
            `s_aux` [H]: a learned score that takes part in the softmax and has no value (gpt-oss).
    """
    if step_layout is None:
        raise RuntimeError(f"{type(module).__name__} does not pass keyword arguments on to its attention")
    layout = step_layout
    index: int = module.layer_idx  # type: ignore[assignment]
    keys, values = layout.cache.layer(index, key)
    keys[layout.slots_T, :, layout.positions_T] = key[0].transpose(0, 1)
    values[layout.slots_T, :, layout.positions_T] = value[0].transpose(0, 1)

    num_heads, num_kv_heads, dim = query.shape[1], key.shape[1], value.shape[3]
    scale = scaling if scaling is not None else query.shape[3] ** -0.5
    extras = _Extras(softcap, s_aux)
    outputs: list[torch.Tensor] = []
    n = layout.num_decoding
    if n:
        # The G queries that share a key-value head stand in the query axis: no repeated keys.
        query_nKGD = query[0, :, :n].transpose(0, 1).reshape(n, num_kv_heads, num_heads // num_kv_heads, -1)
        mask = layout.decode_mask(sliding_window)
        reach = layout.longest
        out_nKGD = _attention(query_nKGD, keys[:n, :, :reach], values[:n, :, :reach], mask, scale, extras)
        outputs.append(out_nKGD.reshape(n, num_heads, dim))
    for segment in layout.segments:
        seen = segment.start + segment.end - segment.begin
        groups = num_heads // num_kv_heads
        keys_HCD = keys[segment.slot, :, :seen].repeat_interleave(groups, dim=0)
        values_HCD = values[segment.slot, :, :seen].repeat_interleave(groups, dim=0)
        query_HLD = query[0, :, segment.begin : segment.end]
        mask = layout.prompt_mask(segment, sliding_window)
        out_HLD = _attention(query_HLD[None], keys_HCD[None], values_HCD[None], mask, scale, extras, causal=True)[0]
        outputs.append(out_HLD.transpose(0, 1))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


@dataclass(frozen=True, slots=True)
class _Extras:
    softcap: float | None
    s_aux: torch.Tensor | None


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    extras: _Extras,
    *,
    causal: bool = False,
) -> torch.Tensor:
    """[B, K, Q, D] over [B, K, C, D]; `causal` with no mask is the lower triangle."""
    if extras.softcap is None and extras.s_aux is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal and mask is None, scale=scale
        )
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if extras.softcap is not None:
        scores = torch.tanh(scores / extras.softcap) * extras.softcap
    if mask is None:
        mask = torch.full(scores.shape[-2:], float("-inf"), device=scores.device).triu(1)
    scores = scores + mask
    if extras.s_aux is not None:
        heads = extras.s_aux.float()
        # [H] to the layout of the scores: [K, G] while decoding, [H, 1] in a prompt.
        sink = heads.reshape(1, query.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
        probabilities = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    else:
        probabilities = torch.softmax(scores, dim=-1)
    return probabilities.to(value.dtype) @ value
