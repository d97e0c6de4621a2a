"""Rows that are tokens already."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_data.formats._base import Row, RowError
from gym_data.formats._meta import dump_meta, load_meta
from gym_data.record import Record, Source

_MASKS = ("loss_mask", "assistant_masks", "completion_mask")
IGNORED = -100
"""The label of a token that is not trained."""


class Tokens:
    """`{"input_ids": [int], "labels": [int]}`, or a mask of 0 and 1 (`loss_mask`, `assistant_masks`,
    `completion_mask`) instead of labels; without either every token is trained."""

    name = "tokens"
    signature = "input_ids"
    fields: tuple[str, ...] = ("input_ids", "labels", *_MASKS)

    def matches(self, row: Row) -> bool:
        return "input_ids" in row

    def to_record(self, row: Row, source: Source) -> Record:
        _read(row)
        return Record("tokens", meta_json=dump_meta(row=row), source=source)

    def export(self, record: Record) -> Row:
        return load_meta(record.meta_json)["row"]


def tokens_of(record: Record) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Ids and loss mask of a record of kind `tokens`."""
    return _read(load_meta(record.meta_json)["row"])


def _read(row: Row) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    ids = _integers(
        row.get("input_ids"), "input_ids", len(row["input_ids"]) if isinstance(row["input_ids"], list) else 0
    )
    if not len(ids) or ids.min() < 0 or ids.max() >= 2**32:
        raise RowError("input_ids must be a list of token ids", "input_ids")
    if row.get("labels") is not None:
        labels = _integers(row["labels"], "labels", len(ids))
        if ((labels != IGNORED) & (labels != ids)).any():
            raise RowError("a label is neither -100 nor its token: labels must not be shifted", "labels")
        return ids.astype(np.uint32), (labels != IGNORED).astype(np.uint8)
    key = next((key for key in _MASKS if row.get(key) is not None), None)
    mask = _integers(row[key], key, len(ids)) if key else np.ones(len(ids), np.int64)
    if ((mask != 0) & (mask != 1)).any():
        raise RowError("a mask holds 0 and 1 only", key)
    return ids.astype(np.uint32), mask.astype(np.uint8)


def _integers(value: Any, key: str, length: int) -> NDArray[np.int64]:
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise RowError(f"{key} must be a list of whole numbers", key)
    if len(value) != length:
        raise RowError(f"{key} has {len(value)} entries for {length} tokens", key)
    try:
        return np.array(value, np.int64)
    except OverflowError:
        raise RowError(f"{key} holds a number beyond 64 bits", key) from None
