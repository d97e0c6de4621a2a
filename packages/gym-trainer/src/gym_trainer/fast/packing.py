"""The layout of a packed micro-batch, as it travels through a model's forward.

Documents lie side by side in one row without padding: `input_ids` is [1, T]. Two things keep them apart:

- `position_ids` [1, T] restart at 0 with every document;
- `cu_seq_lens_q` and `cu_seq_lens_k` int32 [N+1] hold the N+1 document bounds, `max_length_q` and `max_length_k` the
  longest document. These are the names of transformers' `FlashAttentionKwargs`: a model hands unknown keyword arguments
  of its forward down to the attention function, where `gym_trainer.fast.attention` reads them.

Legend: N documents, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Where each document of a packed row begins and ends."""

    position_ids: torch.Tensor
    """int64 [1, T], restarting at 0."""
    cu_seq_lens: torch.Tensor
    """int32 [N+1], from 0 to T."""
    max_length: int
    """The longest document, rounded up to a power of two: kernels size their grid by it, and few distinct values mean
    few recompilations."""
    equal_length: int | None = None
    """The documents' length where they all have the same, a multiple of 128: they are then a batch like any other, and
    a dense kernel may serve them."""

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedLayout:
        """The layout of documents of these lengths, in this order.

        Raises:
            ValueError: no document, or an empty one.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a packed row needs documents of at least one token, got lengths {list(lengths)}")
        lengths_N = torch.tensor(lengths, dtype=torch.int64)
        cu_seq_lens = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(lengths_N, 0, out=cu_seq_lens[1:])
        starts_T = torch.repeat_interleave(cu_seq_lens[:-1], lengths_N)
        position_ids = torch.arange(int(cu_seq_lens[-1])) - starts_T
        return cls(
            position_ids=position_ids[None].to(device),
            cu_seq_lens=cu_seq_lens.to(torch.int32).to(device),
            max_length=1 << (max(lengths) - 1).bit_length(),
            equal_length=lengths[0] if len(set(lengths)) == 1 and lengths[0] % 128 == 0 else None,
        )

    def model_kwargs(self) -> dict[str, torch.Tensor | int]:
        """The keyword arguments for the model's forward, beside `input_ids` [1, T]."""
        equal = {} if self.equal_length is None else {"equal_length": self.equal_length}
        return equal | {
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.cu_seq_lens,
            "cu_seq_lens_k": self.cu_seq_lens,
            "max_length_q": self.max_length,
            "max_length_k": self.max_length,
        }
