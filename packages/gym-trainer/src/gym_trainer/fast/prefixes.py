"""Documents of a packed row that begin alike, such as the two answers to a prompt, with the beginning computed once.

Each later one has only its own tokens in the row. Causal attention makes the hidden states of what is shared the same
in all of them, so only the attention must know: the keys and values of whole documents are gathered from the row, and a
document's own queries see the beginning before them. A third of the tokens of short answers to a long prompt is saved,
and what a gathered key costs is a copy.

Legend: T packed tokens, S keys of whole documents, R of them shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Prefix(NamedTuple):
    """The beginning that a document takes from an earlier one of the row."""

    document: int
    length: int
    """Of its tokens; 0 where there is nothing to take."""


class SharedKeys(NamedTuple):
    """How the keys of whole documents are made from those of a row that has each shared token once."""

    places_S: torch.Tensor
    """int64: the position in the row of each key, document after document."""
    own_T: torch.Tensor
    """int64: where among the S keys each position stands as its own document's."""
    repeats_R: torch.Tensor
    """int64: which of the S keys stand for an earlier document's position."""

    @classmethod
    def of(cls, bounds: Sequence[int], prefixes: Sequence[Prefix], device: torch.device | str) -> SharedKeys:
        """`bounds` [N+1]: of what each document has in the row; `prefixes` [N]: what it takes from another.

        Raises:
            ValueError: a document takes more than another has, or from one that is not whole or comes later.
        """
        places, own, repeats = [], [], []
        num_keys = 0
        for number, prefix in enumerate(prefixes):
            start, end, source = bounds[number], bounds[number + 1], bounds[prefix.document]
            if prefix.length:
                if prefix.document >= number or prefixes[prefix.document].length:
                    raise ValueError(f"document {number} takes its beginning from no whole document before it")
                if prefix.length > bounds[prefix.document + 1] - source:
                    raise ValueError(f"document {prefix.document} has fewer than {prefix.length} tokens")
                places.append(torch.arange(source, source + prefix.length))
                repeats.append(torch.arange(num_keys, num_keys + prefix.length))
            places.append(torch.arange(start, end))
            own.append(torch.arange(num_keys + prefix.length, num_keys + prefix.length + end - start))
            num_keys += prefix.length + end - start
        return cls(*(torch.cat(parts).to(device) for parts in (places, own, repeats)))


def whole_documents(x: torch.Tensor, dim: int, keys: SharedKeys) -> torch.Tensor:
    """Keys or values of whole documents, S along `dim`, from those of a row, T along it."""
    return _WholeDocuments.apply(x, dim, keys)


class _WholeDocuments(torch.autograd.Function):
    """The gradient of a shared position is the sum of those of its copies; indexing's own would add up the gradients of
    all others in the same slow way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, keys: SharedKeys) -> torch.Tensor:
        ctx.dim, ctx.keys = dim, keys
        return x.index_select(dim, keys.places_S)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's own stub takes any
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        keys: SharedKeys = ctx.keys
        own = grad.index_select(ctx.dim, keys.own_T)
        repeated = grad.index_select(ctx.dim, keys.repeats_R)
        return own.index_add_(ctx.dim, keys.places_S[keys.repeats_R], repeated), None, None
