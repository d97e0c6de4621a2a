"""Wrapping: documents laid end to end and cut into blocks of equal length, for pre-training on plain text.

A block is a group of pieces. A piece does not see the other pieces of its block, so wrapping fills every row without
showing one document to another; a document that is cut goes on in the next block from its next token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gym_data.store.read import Document, TokenStore
from gym_data.store.write import StoreWriter

_BLOCKS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Pieces:
    """P pieces in B blocks of documents that lie end to end."""

    offsets: NDArray[np.int64]
    """[P+1] where each piece starts."""
    documents: NDArray[np.int64]
    """[P] the document of each piece."""
    blocks: NDArray[np.int64]
    """[B+1] the first piece of each block."""


def pieces_of(offsets: NDArray[np.int64], block_tokens: int) -> Pieces:
    """Cuts documents at `offsets` [N+1] into blocks of `block_tokens`; only the last block may be shorter.

    A last block of one token has nothing to predict it from and is left out.
    """
    total = int(offsets[-1])
    if total % block_tokens == 1:
        total -= 1
    edges = np.append(np.arange(0, total, block_tokens, dtype=np.int64), total)
    cuts = np.union1d(offsets[offsets < total], edges)
    documents = np.searchsorted(offsets, cuts[:-1], side="right") - 1
    return Pieces(cuts, documents.astype(np.int64), np.searchsorted(cuts, edges).astype(np.int64))


def write_wrapped(store: TokenStore, writer: StoreWriter, block_tokens: int) -> None:
    """Writes a store's documents as blocks, in bounded memory."""
    pieces = pieces_of(np.asarray(store.offsets), block_tokens)
    for first in range(0, len(pieces.blocks) - 1, _BLOCKS_AT_ONCE):
        blocks = pieces.blocks[first : first + _BLOCKS_AT_ONCE + 1]
        begin, end = int(blocks[0]), int(blocks[-1])
        start, stop = int(pieces.offsets[begin]), int(pieces.offsets[end])
        documents = pieces.documents[begin:end]
        writer.add_many(
            store.load("tokens", start, stop),
            store.load("loss_mask", start, stop),
            np.diff(pieces.offsets[begin : end + 1]),
            store.rows[documents],
            store.roles[documents],
            np.diff(blocks),
        )


class Wrapper:
    """The same for documents that come one by one."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._waiting: deque[Document] = deque()
        self._num_tokens = 0

    @property
    def rest(self) -> list[Document]:
        """What waits for more tokens: with it, wrapping goes on where it was."""
        return list(self._waiting)

    @rest.setter
    def rest(self, documents: list[Document]) -> None:
        self._waiting = deque(documents)
        self._num_tokens = sum(len(document.ids) for document in documents)

    def add(self, document: Document) -> None:
        """Lays a document behind the others."""
        self._waiting.append(document)
        self._num_tokens += len(document.ids)

    def pop(self) -> tuple[Document, ...] | None:
        """The next full block, or None when more tokens are needed."""
        if self._num_tokens < self.block_tokens:
            return None
        pieces: list[Document] = []
        room = self.block_tokens
        while room:
            document = self._waiting.popleft()
            if len(document.ids) > room:
                self._waiting.appendleft(document.part(room, len(document.ids)))
                document = document.part(0, room)
            pieces.append(document)
            room -= len(document.ids)
        self._num_tokens -= self.block_tokens
        return tuple(pieces)
