"""Where each assistant turn of a rendered chat starts and stops.

A turn starts where the generation prompt ends and stops after its stop token: what lies between is what the model has
to write. Both ends come from the template itself: the start from rendering the messages before the turn with
`add_generation_prompt`, the stop from the first stop token that the template, not a message, wrote after the turn's
content. Origins (`traced`) check both: no character of another message may stand in a turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from gym_data.rendering.template import Rendered
from gym_data.rendering.traced import MARK, OUTSIDE, ROLE, UNKNOWN, field_of, is_trusted, message_of


class CannotMask(Exception):
    """The turns of this chat cannot be found under this template."""


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `[start, stop)` of an assistant's turn. `stop_start` is where its stop token begins, if it has one."""

    message: int
    start: int
    stop: int
    stop_start: int | None
    pieces: tuple[tuple[int, int], ...]
    """The trained parts: the whole turn, or what `{% generation %}` marks of it, and the stop token."""


@dataclass(frozen=True, slots=True)
class StopTokens:
    """Texts of the tokens that end a turn."""

    eos: frozenset[str]
    """A model that has written one of these stops."""
    turn_ends: frozenset[str]
    """Tokens that the template writes after a turn, the above or others."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run with its place."""

    start: int
    stop: int
    source: int

    @property
    def message(self) -> int | None:
        return message_of(self.source)

    @property
    def is_content(self) -> bool:
        """Whether it holds something of a message other than its role."""
        return self.message is not None and field_of(self.source) != ROLE


def pieces_of(rendered: Rendered) -> list[Piece]:
    """The runs of a rendered chat with their places; marks are left in the origins."""
    found = []
    position = 0
    for length, source in rendered.runs:
        found.append(Piece(position, position + length, source))
        position += length
    return found


def find_spans(
    full: Rendered,
    turns: Collection[int],
    render_prompt: Callable[[int], Rendered],
    render_alone: Callable[[int], Rendered],
    generation_prompt: Callable[[], str],
    stops: StopTokens,
    added_tokens: re.Pattern[str],
) -> list[Span]:
    """The spans of the assistant turns `turns`.

    `render_prompt(i)` renders the messages before `i` with the generation prompt, `render_alone(i)` those through `i`
    without; `generation_prompt()` is for a turn that has no messages before it; `added_tokens` matches the tokenizer's
    added tokens. Raises CannotMask.
    """
    pieces = pieces_of(full)
    has_marks = any(piece.source & MARK for piece in pieces)
    spans: list[Span] = []
    for turn in sorted(turns):
        if turn:
            start = _start(full, pieces, turn, render_prompt(turn), added_tokens)
        else:
            start = _first_start(full, pieces, generation_prompt())
        stop_start, stop = _stop(full, pieces, turn, start, lambda turn=turn: render_alone(turn), stops)
        _check(full, pieces, turn, start, stop, spans[-1].stop if spans else 0)
        kept = _marked(pieces, start, stop, stop_start) if has_marks else ((start, stop),)
        spans.append(Span(turn, start, stop, stop_start, kept))
    return spans


def _start(full: Rendered, pieces: list[Piece], turn: int, prompt: Rendered, added_tokens: re.Pattern[str]) -> int:
    content = [piece for piece in pieces if piece.is_content and piece.message == turn]
    if full.text.startswith(prompt.text):
        # Content of the turn before this place is a look-ahead of the template (a tool's name), not the turn itself.
        return len(prompt.text)
    # The template wrote something earlier differently (dropped reasoning, moved a system prompt): line the two up after
    # the last thing that both say of an earlier message.
    anchor = next((p for p in reversed(pieces_of(prompt)) if p.is_content or p.source & ~MARK == OUTSIDE), None)
    tail = prompt.text[anchor.stop if anchor else 0 :]
    limit = content[0].start if content else len(full.text)
    earlier = [p for p in pieces if anchor and (p.source ^ anchor.source) & ~MARK == 0 and p.stop <= limit]
    if anchor and not earlier:
        raise CannotMask("what the template writes before the turn has no counterpart in the generation prompt")
    begin = earlier[-1].stop if earlier else 0
    between = full.text[begin:limit]
    common = _common_prefix(tail, between)
    for text in (tail, between):
        for match in added_tokens.finditer(text):
            if match.start() < common < match.end():
                common = match.start()
    if tail and not common:
        raise CannotMask("the turn does not begin as the generation prompt says")
    return begin + common


def _first_start(full: Rendered, pieces: list[Piece], generation_prompt: str) -> int:
    """The start of a chat that begins with the assistant: most templates cannot render a prompt without messages."""
    content = next((piece.start for piece in pieces if piece.is_content), len(full.text))
    later = next((piece.start for piece in pieces if piece.message), len(full.text))
    at = full.text.rfind(generation_prompt, 0, min(content, later)) if generation_prompt else -1
    if at < 0:
        raise CannotMask("the chat begins with the assistant, and no generation prompt stands before its turn")
    return at + len(generation_prompt)


def _stop(
    full: Rendered,
    pieces: list[Piece],
    turn: int,
    start: int,
    render_alone: Callable[[], Rendered],
    stops: StopTokens,
) -> tuple[int | None, int]:
    """`(start of the stop token, end of the turn)`."""
    boundary = next((p.start for p in pieces if p.start >= start and (p.message or -1) > turn), len(full.text))
    inside = [p for p in pieces if p.start < boundary and p.stop > start]
    last = max((p.stop for p in inside if p.is_content and p.message == turn), default=start)
    written = "".join(
        # Other characters are blanked, so that only what the template wrote can be a stop token.
        full.text[max(p.start, start) : min(p.stop, boundary)]
        if is_trusted(p.source)
        else "\0" * (min(p.stop, boundary) - max(p.start, start))
        for p in inside
    )
    eos = _first(stops.eos, written, 0)
    if eos and start + eos[0] < last:
        # The template speaks of the turn again later (a tool result that names its call).
        return start + eos[0], start + eos[1]
    found = _first(stops.eos | stops.turn_ends, written, last - start)
    if found:
        return start + found[0], start + found[1]
    alone = render_alone()
    content = [p for p in pieces_of(alone) if p.is_content and p.message == turn]
    tail = alone.text[content[-1].stop :] if content else ""
    stop = last + _common_prefix(tail, full.text[last:boundary])
    return None, max(last, start + len(full.text[start:stop].rstrip()))


def _first(tokens: Collection[str], text: str, begin: int) -> tuple[int, int] | None:
    """The span of the earliest of `tokens` in `text[begin:]`."""
    found = [(at, at + len(token)) for token in tokens if token and (at := text.find(token, begin)) >= 0]
    return min(found, key=lambda span: (span[0], -span[1]), default=None)


def _check(full: Rendered, pieces: list[Piece], turn: int, start: int, stop: int, previous_stop: int) -> None:
    if start < previous_stop:
        raise CannotMask("the turn overlaps the one before it")
    for piece in pieces:
        if piece.stop <= start or piece.start >= stop:
            continue
        foreign = piece.message is not None and piece.message != turn
        if (foreign and piece.is_content) or piece.source & ~MARK == OUTSIDE:
            raise CannotMask(
                f"text of another message stands inside the turn: {full.text[piece.start : piece.stop]!r:.60}"
            )
    rendered = [p for p in pieces if p.is_content and p.message == turn]
    if rendered and not any(p.start < stop and p.stop > start for p in rendered):
        raise CannotMask("the turn's content does not stand between its generation prompt and its stop token")
    if stop > start and all(p.source & ~MARK == UNKNOWN for p in pieces if p.start < stop and p.stop > start):
        raise CannotMask("the template transforms the content in a way that cannot be followed")


def _marked(pieces: list[Piece], start: int, stop: int, stop_start: int | None) -> tuple[tuple[int, int], ...]:
    if not any(piece.source & MARK for piece in pieces if piece.start < stop and piece.stop > start):
        return ()
    kept: list[tuple[int, int]] = []
    for piece in pieces:
        low, high = max(piece.start, start), min(piece.stop, stop if stop_start is None else stop_start)
        if piece.source & MARK and low < high:
            kept = [*kept[:-1], (kept[-1][0], high)] if kept and kept[-1][1] == low else [*kept, (low, high)]
    if stop_start is not None:
        joined = kept and kept[-1][1] == stop_start
        kept = [*kept[:-1], (kept[-1][0], stop)] if joined else [*kept, (stop_start, stop)]
    return tuple(kept)


def _common_prefix(one: str, other: str) -> int:
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(i for i in range(length) if one[i] != other[i])
