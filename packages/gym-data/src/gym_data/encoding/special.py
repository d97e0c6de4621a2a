"""Encoding text in which some occurrences of special tokens must stay text.

`tokenizers` cuts a text at its added tokens first and encodes the pieces between them on their own. This module does
the same cutting, leaves out the forbidden occurrences, and hands each piece to a second tokenizer that does not know
the forbidden tokens. Everything else is encoded exactly as usual.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import tokenizers

from gym_data.encoding.spec import read_spec, spec_text
from gym_sdk.errors import DataError

# Noncharacters, never in real text, that stand before a piece that is not the first: it gets no prefix space then.
_ANCHOR = "\ufdd0\ufdd3\ufde1\ufdef"


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is cut out of the text before anything else. `lstrip` and `rstrip` swallow the spaces beside it."""

    text: str
    id: int
    special: bool
    lstrip: bool = False
    rstrip: bool = False


class SplitEncoder:
    """Encodes texts in which the `forbidden` tokens may not be recognised everywhere."""

    def __init__(self, tokenizer_json: str, added: Iterable[AddedToken], forbidden: Collection[str]) -> None:
        self._json = tokenizer_json
        self._added = {token.text: token for token in added}
        self._forbidden = frozenset(forbidden)
        self._forbidden_ids = frozenset(self._added[text].id for text in self._forbidden)
        self._find_forbidden = _any_of(self._forbidden)
        self._find_added = _any_of(self._added)

    def occurrences(self, text: str) -> list[tuple[int, int]]:
        """Where forbidden tokens stand in `text`."""
        return [match.span() for match in self._find_forbidden.finditer(text)]

    def encode(self, text: str, backend: tokenizers.Tokenizer) -> list[int]:
        """Ids of a text in which every forbidden token is ordinary text."""
        if not self._find_forbidden.search(text):
            return backend.encode(text, add_special_tokens=False).ids
        return [id_ for id_, _ in self.encode_with_starts(text, lambda start, stop: True)]

    def encode_with_starts(self, text: str, is_rejected: Callable[[int, int], bool]) -> list[tuple[int, int]]:
        """`(id, first character)` of each token; `is_rejected(start, stop)` says which forbidden tokens stay text."""
        found: list[tuple[int, int]] = []
        piece_start = search_from = 0
        dirty = False
        while match := self._find_added.search(text, search_from):
            token = self._added[match.group()]
            start, stop = match.span()
            if token.text in self._forbidden and is_rejected(start, stop):
                dirty = True
                search_from = start + 1
                continue
            piece_stop = start
            if token.lstrip:
                piece_stop = piece_start + len(text[piece_start:start].rstrip())
            found += self._piece(text, piece_start, piece_stop, dirty)
            found.append((token.id, start))
            if token.rstrip:
                stop += len(text[stop:]) - len(text[stop:].lstrip())
            piece_start = search_from = stop
            dirty = False
        return found + self._piece(text, piece_start, len(text), dirty)

    def _piece(self, text: str, start: int, stop: int, dirty: bool) -> list[tuple[int, int]]:
        if start >= stop:
            return []
        if _ANCHOR in text:
            raise DataError("the text holds the noncharacters U+FDD0 U+FDD3 U+FDE1 U+FDEF, which Gym needs for itself")
        anchor = _ANCHOR if start else ""
        encoder = self._split if dirty else self._whole
        encoded = encoder.encode(anchor + text[start:stop], add_special_tokens=False)
        shift = start - len(anchor)
        tokens = [
            (id_, max(start, begin + shift)) for id_, (begin, _) in zip(encoded.ids, encoded.offsets, strict=True)
        ]
        tokens = tokens[1:] if anchor else tokens
        if dirty and any(id_ in self._forbidden_ids for id_, _ in tokens):
            # A Unigram model holds its special tokens as ordinary pieces: break the text inside the token.
            cuts = [begin + 1 for begin, _ in self.occurrences(text[start:stop])]
            edges = [start, *(start + cut for cut in cuts), stop]
            return [t for a, b in pairwise(edges) for t in self._piece(text, a, b, False)]
        return tokens

    @cached_property
    def _whole(self) -> tokenizers.Tokenizer:
        return self._clone(frozenset())

    @cached_property
    def _split(self) -> tokenizers.Tokenizer:
        return self._clone(self._forbidden)

    def _clone(self, without: frozenset[str]) -> tokenizers.Tokenizer:
        spec = read_spec(self._json)
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in without]
        clone = tokenizers.Tokenizer.from_str(spec_text(spec))
        clone.add_special_tokens([tokenizers.AddedToken(_ANCHOR, special=True, normalized=False)])
        return clone


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Matches any of `texts`, the longest first, as `tokenizers` does; nothing when there is none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
