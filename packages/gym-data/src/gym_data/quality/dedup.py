"""Rows that say the same, exactly or nearly."""

from __future__ import annotations

import hashlib
import re

import numpy as np
from numpy.typing import NDArray

from gym_data.quality.rows import content_key, text_of
from gym_data.record import Record

_WORD = re.compile(r"\w+")
SHINGLE_WORDS = 5
NUM_HASHES = 128
_PRIME = (1 << 61) - 1


class Seen:
    """Remembers records. `near` is the share of common word sequences above which two count as the same."""

    def __init__(self, near: float | None = None) -> None:
        self._exact: dict[bytes, str] = {}
        self._near = NearDuplicates(near) if near is not None else None

    def earlier(self, record: Record, place: str) -> tuple[str, str] | None:
        """`(how, place)` of an earlier record that says the same; remembers this one when there is none."""
        key = content_key(record)
        if key in self._exact:
            return "equal", self._exact[key]
        if self._near is not None and (found := self._near.earlier(text_of(record), place)):
            return "nearly equal", found
        self._exact[key] = place
        return None


class NearDuplicates:
    """MinHash signatures in bands (Broder 1997; Leskovec et al., Mining of Massive Datasets, 3.4).

    A signature's 128 minima are cut into bands; two texts are compared when a band is equal, and count as the same when
    the share of equal minima, an estimate of the Jaccard similarity of their 5-word sequences, reaches the threshold.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._rows = next(
            rows for rows in (32, 16, 8, 4, 2, 1) if (rows / NUM_HASHES) ** (1 / rows) <= threshold or rows == 1
        )
        random = np.random.default_rng(0)
        self._a = random.integers(1, _PRIME, NUM_HASHES, dtype=np.uint64)
        self._b = random.integers(0, _PRIME, NUM_HASHES, dtype=np.uint64)
        self._bands: dict[tuple[int, bytes], list[int]] = {}
        self._signatures: list[NDArray[np.uint32]] = []
        self._places: list[str] = []

    def earlier(self, text: str, place: str) -> str | None:
        """The place of an earlier text that is nearly the same; remembers this one when there is none."""
        signature = self._signature(text)
        bands = [(i, signature[i : i + self._rows].tobytes()) for i in range(0, NUM_HASHES, self._rows)]
        for candidate in {other for band in bands for other in self._bands.get(band, ())}:
            if np.mean(self._signatures[candidate] == signature) >= self._threshold:
                return self._places[candidate]
        for band in bands:
            self._bands.setdefault(band, []).append(len(self._signatures))
        self._signatures.append(signature)
        self._places.append(place)
        return None

    def _signature(self, text: str) -> NDArray[np.uint32]:
        words = _WORD.findall(text.lower())
        shingles = {" ".join(words[i : i + SHINGLE_WORDS]) for i in range(max(1, len(words) - SHINGLE_WORDS + 1))}
        digests = b"".join(
            hashlib.blake2b(s.encode("utf-8", "surrogatepass"), digest_size=8).digest() for s in shingles
        )
        values = np.frombuffer(digests, np.uint64)[:, None]
        # Multiply-shift hashing: unsigned overflow is its modulus.
        mixed = (values * (self._a | np.uint64(1)) + self._b) >> np.uint64(32)
        return mixed.min(axis=0).astype(np.uint32)
