"""Dividing rows by what they say, so that equal rows never stand on both sides."""

from __future__ import annotations

import hashlib


def is_held_out(key: bytes, share: float, seed: int) -> bool:
    """Whether a record of this content is among the held-out share.

    It depends on content and seed alone: a row stays on its side when others are added, and the share is met on
    average.
    """
    digest = hashlib.blake2b(key, key=seed.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
