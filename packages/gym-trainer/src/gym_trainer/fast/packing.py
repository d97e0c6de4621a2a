"""The layout of a packed micro-batch, as it travels through a model's forward.

Documents lie side by side in one row without padding: `input_ids` is [1, T]. Two things keep them apart:

- `position_ids` [1, T] restart at 0 with every document;
- `cu_seq_lens_q` and `cu_seq_lens_k` int32 [N+1] hold the N+1 document bounds, `max_length_q` and `max_length_k` the
  longest document. These are the names of transformers' `FlashAttentionKwargs`: a model hands unknown keyword arguments
  of its forward down to the attention function, where `gym_trainer.fast.attention` reads them.

Documents may share their beginning with an earlier one (`gym_trainer.fast.prefixes`): then only their own tokens are in
the row, and the bounds of the keys are not those of the queries.

Legend: N documents, T packed tokens, S keys of whole documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from gym_trainer.fast.prefixes import Prefix, SharedKeys


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Where each document of a packed row begins and ends."""

    position_ids: torch.Tensor
    """int64 [1, T], restarting with every document: at 0, or behind the tokens it shares."""
    cu_seq_lens: torch.Tensor
    """int32 [N+1], from 0 to T."""
    cu_seq_lens_k: torch.Tensor
    """The same of the keys, from 0 to S; the very tensor of `cu_seq_lens` where nothing is shared."""
    max_length: int
    """The longest whole document, rounded up to a power of two: kernels size their grid by it, and few distinct values
    mean few recompilations."""
    shared_keys: SharedKeys | None = None
    equal_length: int | None = None
    """The documents' length where they all have the same, a multiple of 128: they are then a batch like any other, and
    a dense kernel may serve them."""

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu", *, prefixes: Sequence[Prefix] = ()
    ) -> PackedLayout:
        """The layout of documents in this order.

        Args:
            lengths: of what each document has in the row.
            prefixes: for each document what it takes from an earlier one, which has no prefix itself.

        Raises:
            ValueError: no document, an empty one, or a prefix that its document does not have.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a packed row needs documents of at least one token, got lengths {list(lengths)}")
        shared = [prefix.length for prefix in prefixes] or [0] * len(lengths)
        cu_seq_lens = _bounds(lengths)
        starts_N, shared_N = cu_seq_lens[:-1], torch.tensor(shared)
        lengths_N = torch.tensor(lengths, dtype=torch.int64)
        position_ids = torch.arange(int(cu_seq_lens[-1])) + torch.repeat_interleave(shared_N - starts_N, lengths_N)
        on_device = cu_seq_lens.to(torch.int32).to(device)
        on_device_k, shared_keys = on_device, None
        if any(shared):
            on_device_k = _bounds([a + b for a, b in zip(lengths, shared, strict=True)]).to(torch.int32).to(device)
            shared_keys = SharedKeys.of(cu_seq_lens.tolist(), prefixes, device)
        equal = lengths[0] if len(set(lengths)) == 1 and lengths[0] % 128 == 0 and not any(shared) else None
        return cls(
            position_ids=position_ids[None].to(device),
            cu_seq_lens=on_device,
            cu_seq_lens_k=on_device_k,
            max_length=1 << (max(map(sum, zip(lengths, shared, strict=True))) - 1).bit_length(),
            shared_keys=shared_keys,
            equal_length=equal,
        )

    def model_kwargs(self) -> dict[str, Any]:
        """The keyword arguments for the model's forward, beside `input_ids` [1, T]."""
        where = {"equal_length": self.equal_length, "shared_keys": self.shared_keys}
        return {name: value for name, value in where.items() if value is not None} | {
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.cu_seq_lens,
            "cu_seq_lens_k": self.cu_seq_lens_k,
            "max_length_q": self.max_length,
            "max_length_k": self.max_length,
        }


def _bounds(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int64)
