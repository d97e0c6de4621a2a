"""A chunk of rows, encoded: arrays that can be written, and everything the report counts."""

from __future__ import annotations

import gc
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_data.preparing.documents import EncodedDocument, EncodedRow, RowEncoder
from gym_data.record import Record
from gym_data.sources.chunk import Chunk
from gym_data.sources.records import RecordReader, Seen
from gym_sdk.spec.data import DataSource

MAX_LISTED = 100
"""Places listed for each reason of a batch."""


@dataclass(slots=True)
class EncodedBatch:
    """N documents in G groups. `hashes` name each group's content, salted with the seed: [G, 16] bytes."""

    tokens: NDArray[np.uint32]
    loss_mask: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]
    roles: NDArray[np.uint8]
    group_sizes: NDArray[np.int64]
    hashes: NDArray[np.uint8]
    num_rows: int = 0
    num_used: int = 0
    num_truncated: int = 0
    num_without_stop: int = 0
    dropped: dict[str, Seen] = field(default_factory=dict)
    left_out: dict[str, Seen] = field(default_factory=dict)
    formats: dict[str, Seen] = field(default_factory=dict)
    objectives: dict[str, int] = field(default_factory=dict)
    systems: list[str] = field(default_factory=list)
    """As in the report."""


def encode_chunk(
    chunk: Chunk, source: DataSource, expected: str | None, encoder: RowEncoder, salt: bytes
) -> EncodedBatch:
    """Reads and encodes a chunk. A chunk whose rows have several formats is only counted."""
    reader = RecordReader(source, expected)
    with _collection_paused():
        records = list(reader.records(chunk))
        rows = [] if reader.is_mixed else encoder.encode(records)
        batch = _assemble(rows, salt)
    batch.formats = reader.seen
    if encoder.data.system == "template":  # otherwise the model sees no system turn, or not as one
        batch.systems = _systems(records)
    return batch


def _systems(records: list[Record]) -> list[str]:
    """The first two different system messages; an empty one for rows without."""
    found: dict[str, None] = {}
    for record in records:
        first = next(iter(record.prompt or record.messages), None)
        found[first.text if first is not None and first.role == "system" else ""] = None
        if len(found) == 2:
            break
    return list(found)


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Without the search for cycles: the many small objects of rows have none, and to look at them again and again
    takes a sixth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _assemble(rows: list[EncodedRow], salt: bytes) -> EncodedBatch:
    salted = hashlib.blake2b(key=salt, digest_size=16)
    ids: list[NDArray[np.uint32]] = []
    masks: list[NDArray[np.uint8]] = []
    numbers: list[int] = []
    roles: list[int] = []
    group_sizes: list[int] = []
    hashes: list[bytes] = []
    for row in rows:
        number = row.source.row if row.source else 0
        for group in row.groups:
            group_sizes.append(len(group))
            hashes.append(content_hash(group, salted))
            for document in group:
                ids.append(document.ids)
                masks.append(document.loss_mask)
                numbers.append(number)
                roles.append(document.role)
    batch = EncodedBatch(
        tokens=_concatenated(ids, np.uint32),
        loss_mask=_concatenated(masks, np.uint8),
        lengths=np.array([len(one) for one in ids], np.int64),
        rows=np.array(numbers, np.int64),
        roles=np.array(roles, np.uint8),
        group_sizes=np.array(group_sizes, np.int64),
        hashes=np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 16),
        num_rows=len(rows),
        num_used=sum(1 for row in rows if row.groups),
        num_truncated=sum(row.truncated for row in rows),
        num_without_stop=sum(row.without_stop for row in rows),
        objectives=dict(Counter(row.objective for row in rows)),
    )
    for row in rows:
        if row.dropped and not row.groups:
            batch.dropped.setdefault(row.dropped, Seen()).add(_place(row), MAX_LISTED)
        for path in row.left_out:
            batch.left_out.setdefault(path.split(".", 1)[1], Seen()).add(_place(row), MAX_LISTED)
    return batch


def _place(row: EncodedRow) -> str:
    return f"{row.source.uri}:{row.source.row}" if row.source else "?"


def content_hash(group: Iterable[EncodedDocument], salted: hashlib.blake2b) -> bytes:
    """16 bytes that are equal for equal documents; their order is random but fixed by the key of `salted`."""
    digest = salted.copy()
    for document in group:
        digest.update(len(document.ids).to_bytes(8, "little"))
        digest.update(document.ids.tobytes())
    return digest.digest()


def _concatenated(parts: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
