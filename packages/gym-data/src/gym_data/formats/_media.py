"""Media that stand beside the text: lists of files, and a placeholder in the text for each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import cast

from gym_data.formats._base import Row, RowError, type_name
from gym_data.record import Message, Part, PartType

_KEYS: dict[str, PartType] = {"images": "image", "videos": "video", "audios": "audio"}
MEDIA_KEYS = tuple(_KEYS)
_PLACEHOLDER = re.compile("<(image|video|audio)>")


class MediaReader:
    """Puts the row's media in the place of their placeholders, in order."""

    def __init__(self, row: Row) -> None:
        self._left: dict[PartType, list[str]] = {}
        for key, kind in _KEYS.items():
            files = row.get(key) or []
            files = [files] if isinstance(files, str) else files
            if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
                raise RowError(f"{key} must be a list of paths or URLs, not {type_name(row[key])}", key)
            if files:
                self._left[kind] = list(files)
        self._given = {kind: len(files) for kind, files in self._left.items()}
        self._used: dict[PartType, int] = {}

    def parts(self, text: str) -> tuple[Part, ...]:
        """The text with media parts; plain text where the row has no media of the placeholder's kind."""
        if not self._given:
            return (Part("text", text),)
        parts: list[Part] = []
        position = 0
        for match in _PLACEHOLDER.finditer(text):
            kind = cast(PartType, match.group(1))
            if kind not in self._given:
                continue
            self._used[kind] = self._used.get(kind, 0) + 1
            if self._left[kind]:
                if match.start() > position:
                    parts.append(Part("text", text[position : match.start()]))
                parts.append(Part(kind, media=self._left[kind].pop(0)))
                position = match.end()
        if position < len(text) or not parts:
            parts.append(Part("text", text[position:]))
        return tuple(parts)

    def finish(self) -> None:
        """Raises RowError unless every medium had its placeholder and every placeholder its medium."""
        for kind in self._given:
            used, given = self._used.get(kind, 0), self._given[kind]
            if used != given:
                raise RowError(f"{used} <{kind}> placeholders for {given} {kind} files", f"{kind}s")


def placeholder_text(message: Message) -> str:
    """The text of a message with a placeholder for each medium."""
    return "".join(part.text or "" if part.type == "text" else f"<{part.type}>" for part in message.parts)


def media_lists(messages: Iterable[Message]) -> Row:
    """The lists of files beside the text."""
    lists: Row = {}
    for message in messages:
        for part in message.parts:
            key = next((key for key, kind in _KEYS.items() if kind == part.type), None)
            if key is not None:
                lists.setdefault(key, []).append(part.media)
    return lists
