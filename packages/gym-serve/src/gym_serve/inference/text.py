"""Token ids to text while they come: whole characters only, and never part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_MOST_HELD_IDS = 8
"""A character is at most four bytes, each at worst a token; ids held longer than this are not a character to be."""


class TextDecoder:
    """Turns ids into pieces of text whose concatenation is the decoding of all of them.

    A tokenizer may split a character over several tokens, and may write a space before a word only because of the word
    before it. So a few ids before the new ones are always decoded along, and a piece is the difference.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._done = 0
        """Ids before this have been given out."""
        self._context = 0
        """Ids from here to `_done` are decoded along."""

    def push(self, token_id: int) -> str:
        """The text that is now certain; empty while a character is incomplete."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._context : self._done])
        now = self._decode(self._ids[self._context :])
        if now.endswith(_REPLACEMENT) and len(self._ids) - self._done < _MOST_HELD_IDS:
            return ""
        self._context, self._done = self._done, len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        """What is left at the end of an answer, without the bytes of a character that was cut off."""
        before = self._decode(self._ids[self._context : self._done])
        rest = self._decode(self._ids[self._context :])[len(before) :]
        self._context = self._done = len(self._ids)
        return rest.rstrip(_REPLACEMENT)


class StopMatcher:
    """Holds text back while it may be the start of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.rest: str = ""
        """After a stop string was found: what followed it."""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be sent, and whether a stop string was found; nothing after its start is sent."""
        if not self._stops:
            return text, False
        self._held += text
        found = [(at, -len(stop)) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, length = min(found)
            sent, self.rest, self._held = self._held[:at], self._held[at - length :], ""
            return sent, True
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        sent, self._held = self._held[:cut], self._held[cut:]
        return sent, False

    def flush(self) -> str:
        """What was held back at the end of the answer: it was no stop string after all."""
        sent, self._held = self._held, ""
        return sent


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a proper start of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
