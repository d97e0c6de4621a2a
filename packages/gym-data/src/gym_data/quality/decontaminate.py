"""Rows that hold a piece of an evaluation set."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from gym_data.quality.rows import text_of
from gym_data.record import Record

_WORD = re.compile(r"\w+")
NGRAM_WORDS = 13
"""As in GPT-3's decontamination (Brown et al. 2020, appendix C)."""


class Contamination:
    """The 13-word sequences of evaluation records. A shorter text counts as a whole."""

    def __init__(self, records: Iterable[Record], ngram_words: int = NGRAM_WORDS) -> None:
        self._ngram_words = ngram_words
        self._grams: dict[bytes, str] = {}
        self._short: dict[bytes, str] = {}
        for record in records:
            place = f"{record.source.uri}:{record.source.row}" if record.source else "?"
            for text in text_of(record).split("\n"):
                words = _WORD.findall(text.lower())
                if len(words) >= ngram_words:
                    for gram in self._grams_of(words):
                        self._grams.setdefault(gram, place)
                elif len(words) >= 4:
                    self._short.setdefault(_digest(words), place)

    def found_in(self, record: Record) -> str | None:
        """The place of an evaluation record of which the record holds a piece."""
        for text in text_of(record).split("\n"):
            words = _WORD.findall(text.lower())
            for gram in self._grams_of(words):
                if gram in self._grams:
                    return self._grams[gram]
            if len(words) < self._ngram_words and (place := self._short.get(_digest(words))):
                return place
        return None

    def _grams_of(self, words: list[str]) -> Iterable[bytes]:
        return (_digest(words[i : i + self._ngram_words]) for i in range(len(words) - self._ngram_words + 1))


def _digest(words: list[str]) -> bytes:
    return hashlib.blake2b(" ".join(words).encode("utf-8", "surrogatepass"), digest_size=8).digest()
