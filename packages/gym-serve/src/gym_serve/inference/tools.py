"""Where a model's answer says something, thinks, or calls tools, told apart while it comes.

Each family writes calls its own way; which family a model is of is read from its chat template, because that is what
taught it. What looks like a call and is none stays visible as text: nothing that a model said is dropped.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

from gym_serve.inference.text import StopMatcher
from gym_serve.inference.tool_json import CallPiece, JsonCalls

Family = Literal["hermes", "qwen_xml", "mistral", "llama"]


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the model's reasoning."""

    text: str


Piece = Said | Thought | CallPiece


def family_of(chat_template: str) -> Family | None:
    """How a model with this template writes tool calls; None where the template has none."""
    if "<function=" in chat_template and "<tool_call>" in chat_template:
        return "qwen_xml"
    if "<tool_call>" in chat_template:
        return "hermes"
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    if "<|python_tag|>" in chat_template or "Environment: ipython" in chat_template:
        return "llama"
    return None


class ThinkSplitter:
    """Tells `<think>...</think>` from the rest."""

    def __init__(self, *, starts_inside: bool) -> None:
        self._inside = starts_inside
        self._matcher = StopMatcher(["</think>" if starts_inside else "<think>"])
        self._fresh = False

    @property
    def is_inside(self) -> bool:
        """Whether what comes next is thought."""
        return self._inside

    def push(self, text: str) -> list[Thought | Said]:
        """Pieces of thought and of speech, in order."""
        pieces: list[Thought | Said] = []
        rest = text
        while True:
            before, found = self._matcher.push(rest)
            self._add(pieces, before)
            if not found:
                return pieces
            rest = self._matcher.rest
            self._inside = not self._inside
            self._fresh = True
            self._matcher = StopMatcher(["</think>" if self._inside else "<think>"])

    def flush(self) -> list[Thought | Said]:
        """What was held back."""
        pieces: list[Thought | Said] = []
        self._add(pieces, self._matcher.flush())
        return pieces

    def _add(self, pieces: list[Thought | Said], text: str) -> None:
        if self._fresh:  # the newlines around the tags are the template's, not the model's
            text = text.lstrip("\n")
            self._fresh = not text
        if text:
            pieces.append(Thought(text) if self._inside else Said(text))


class ToolParser:
    """Tells tool calls from text, for one answer of one family."""

    def __init__(self, family: Family) -> None:
        opening = {
            "hermes": ["<tool_call>"],
            "qwen_xml": ["<tool_call>"],
            "mistral": ["[TOOL_CALLS]"],
            "llama": ["<|python_tag|>"],
        }[family]
        self._family = family
        self._opening = opening
        self._outside = StopMatcher(opening)
        self._inside: StopMatcher | None = None
        self._raw = ""
        """What was read since the opening, given back as text should no call come of it."""
        self._num_calls = self._num_calls_before = 0
        self._json = JsonCalls()
        self._leading = ""
        """Llama writes a bare JSON object for a call: white space and the first character decide."""
        self._decided = family != "llama"

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._num_calls

    def push(self, text: str) -> list[Piece]:
        """The pieces that this text completes."""
        if not self._decided:
            self._leading += text
            start = self._leading.lstrip()
            if not start:
                return []
            self._decided = True
            text, self._leading = self._leading, ""
            if start.startswith("{"):
                self._open()
                return self._read(text)
        if self._inside is not None:
            return self._read(text)
        before, found = self._outside.push(text)
        pieces: list[Piece] = [Said(before)] if before else []
        if found:
            rest = self._outside.rest
            self._open()
            pieces += self._read(rest)
        return pieces

    def flush(self) -> list[Piece]:
        """The end of the answer: an unfinished call without a name was no call."""
        if self._inside is None:
            text = self._leading + self._outside.flush()
            return [Said(text)] if text else []
        return self._close(self._inside.flush())

    def _open(self) -> None:
        closing = {"hermes": "</tool_call>", "qwen_xml": "</tool_call>", "mistral": "", "llama": ""}[self._family]
        self._inside = StopMatcher([closing])
        self._json = JsonCalls(self._num_calls)
        self._raw = ""
        self._num_calls_before = self._num_calls

    def _read(self, text: str) -> list[Piece]:
        assert self._inside is not None
        before, closed = self._inside.push(text)
        if closed:
            rest = self._inside.rest
            pieces = self._close(before)
            return pieces + self.push(rest)
        return self._calls(before)

    def _calls(self, text: str) -> list[Piece]:
        self._raw += text
        if self._family == "qwen_xml":
            return []  # parameters are typed by what they hold, which only the whole shows
        if self._family == "mistral" and "[ARGS]" in self._raw:
            return []
        pieces = self._json.push(text)
        self._num_calls = max([self._num_calls, *(piece.index + 1 for piece in pieces)])
        return list(pieces)

    def _close(self, last: str) -> list[Piece]:
        pieces = self._calls(last)
        if self._family == "qwen_xml":
            pieces += self._xml_calls()
        elif self._family == "mistral" and "[ARGS]" in self._raw:
            pieces += self._mistral_calls()
        self._num_calls = max([self._num_calls, *(p.index + 1 for p in pieces if isinstance(p, CallPiece))])
        self._inside, self._outside = None, StopMatcher(self._opening)
        if self._num_calls == self._num_calls_before and self._raw.strip():
            opening = "" if self._family == "llama" else self._opening[0]
            closing = "</tool_call>" if self._family in ("hermes", "qwen_xml") else ""
            return [*pieces, Said(f"{opening}{self._raw}{closing}")]
        return pieces

    def _xml_calls(self) -> list[Piece]:
        """`<function=name><parameter=key>value</parameter>...</function>` (Qwen3-Coder)."""
        pieces: list[Piece] = []
        for name, body in re.findall(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", self._raw, re.DOTALL):
            found = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", body, re.DOTALL)
            arguments = {key.strip(): _typed(value) for key, value in found}
            index = self._num_calls + len(pieces)
            pieces.append(CallPiece(index, name.strip(), json.dumps(arguments, ensure_ascii=False)))
        return pieces

    def _mistral_calls(self) -> list[Piece]:
        """`[TOOL_CALLS]name[ARGS]{...}`, repeated (Mistral since v11)."""
        pieces: list[Piece] = []
        for part in self._raw.split("[TOOL_CALLS]"):
            name, marker, arguments = part.partition("[ARGS]")
            if marker:
                name = name.split("[CALL_ID]")[0].strip()
                pieces.append(CallPiece(self._num_calls + len(pieces), name, arguments.strip()))
        return pieces


def _typed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
