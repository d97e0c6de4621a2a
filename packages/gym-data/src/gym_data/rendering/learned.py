"""The quick way from chats to masked tokens: a program for each shape of chat, and token positions by counting.

The first chat of a shape is rendered in full, its turns are found and checked (`spans`), and what the template did is
recorded (`recorded`). Further chats of the shape are rendered by that program. Their tokens come without offsets: a
turn starts so many control tokens into the text, and a known few tokens after that. Whatever does not fit is left to
the full way, and a share of the texts is rendered again by the template to hold the program to it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gym_data.record import Message
from gym_data.rendering.recorded import Program, Recorded, Recorder, Text, Untraceable, joined
from gym_data.rendering.spans import Span
from gym_data.rendering.template import TemplateFailed

logger: logging.Logger = logging.getLogger(__name__)

Shape = tuple[tuple[str, bool, bool], ...]
"""Of each message: its role, whether it has content, whether it has reasoning."""

ID_BYTES = 4
"""Bytes of a token id, a uint32."""
CHECKED_FIRST = 8
CHECKED_EVERY = 64
"""A program's first texts, and then every so many, are compared with the template's."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Where an assistant turn stands among the control tokens of its text."""

    message: int
    start_control: int
    """The turn starts after this one (counted from 0) ..."""
    lead: bytes
    """... and these tokens, the rest of the generation prompt: uint32 side by side."""
    stop_control: int | None
    """The turn ends with this one; at the end of the text when None."""


@dataclass(slots=True)
class Learned:
    """What was learnt of a shape."""

    program: Program
    controls: list[int]
    """Ids of the control tokens, in order."""
    turns: tuple[Turn, ...]
    left_out: tuple[str, ...]
    without_stop: bool
    num_uses: int = 0
    is_wrong: bool = False

    def render(self, inputs: Sequence[str]) -> str | None:
        """The text, or None when the chat does not meet the conditions."""
        return None if self.is_wrong else self.program.render(inputs)

    def is_due(self) -> bool:
        """Whether this use is one to check."""
        self.num_uses += 1
        return self.num_uses <= CHECKED_FIRST or self.num_uses % CHECKED_EVERY == 0

    def refuse(self) -> None:
        """Stops using the program: the template did something else."""
        self.is_wrong = True
        logger.warning("chat_template.program_differs: chats of this shape are rendered in full from here on")


def shape_of(messages: Sequence[Message]) -> tuple[Shape, list[str]] | None:
    """The shape of a chat and its inputs; None for chats with calls, names or media."""
    shape: list[tuple[str, bool, bool]] = []
    inputs: list[str] = []
    for message in messages:
        if message.name is not None or message.tool_call_id is not None:
            return None
        content = reasoning = None
        for part in message.parts:
            if part.type == "text":
                content = part.text if content is None else content + part.text  # type: ignore[operator]
            elif part.type == "reasoning":
                reasoning = part.text if reasoning is None else reasoning + part.text  # type: ignore[operator]
            else:
                return None
        shape.append((message.role, content is not None, reasoning is not None))
        if content is not None:
            inputs.append(content)
        if reasoning is not None:
            inputs.append(reasoning)
    return tuple(shape), inputs


def recorded_inputs(shape: Shape, inputs: Sequence[str], recorder: Recorder) -> list[dict[str, str]]:
    """Messages of the shape whose texts are recorded."""
    numbered = iter(recorder.input(number, text) for number, text in enumerate(inputs))
    messages = []
    for role, has_content, has_reasoning in shape:
        message: dict[str, str] = {"role": role}
        if has_content:
            message["content"] = next(numbered)
        if has_reasoning:
            message["reasoning_content"] = message["thinking"] = next(numbered)
        messages.append(message)
    return messages


def learn(
    inputs: Sequence[str],
    render: Callable[[Recorder, int, bool], str],
    spans: Sequence[Span],
    left_out: tuple[str, ...],
    text: str,
    control: re.Pattern[str],
    id_of: Callable[[str], int],
    encode: Callable[[str], list[int]],
) -> Learned | None:
    """What can be learnt from one chat; None when its turns do not stand between control tokens.

    `render(recorder, count, prompt)` renders the first `count` messages, `spans` are the turns found in the full text,
    `control` matches control tokens and `encode` gives the ids of template text.
    """
    recorder = Recorder()
    try:
        whole = render(recorder, -1, False)
        for span in spans:
            # What the template asks about the messages before a turn decides where the turn starts.
            if span.message:
                render(recorder, span.message, True)
            if span.stop_start is None:
                render(recorder, span.message + 1, False)
        for number, given in enumerate(inputs):
            # A message of spaces only may vanish; which messages must be seen depends on it.
            recorder.answer(f"x{number}.strip() != ''", bool(given.strip()))
        texts = joined((whole,)) if isinstance(whole, Recorded) else (Text(whole, False),)
        for expression in {t.value for t in texts if t.is_expression}:
            recorder.answer(f"{expression} != ''", True)
        program = Program(len(inputs), recorder.conditions, texts)
    except (Untraceable, TemplateFailed):
        return None
    if program.render(inputs) != text:
        return None
    try:
        turns, controls = _positions(program, inputs, spans, text, control, id_of, encode)
    except _NotBetweenControls:
        return None
    return Learned(program, controls, turns, left_out, any(span.stop_start is None for span in spans))


class _NotBetweenControls(Exception):
    """A turn does not start after a control token of the template, or stops elsewhere."""


def _positions(
    program: Program,
    inputs: Sequence[str],
    spans: Sequence[Span],
    text: str,
    control: re.Pattern[str],
    id_of: Callable[[str], int],
    encode: Callable[[str], list[int]],
) -> tuple[tuple[Turn, ...], list[int]]:
    """The turns by control tokens, which must all be the template's."""
    literals: list[tuple[int, int]] = []
    position = 0
    for stretch in program.texts:
        length = len(_value(stretch, inputs))
        if not stretch.is_expression:
            literals.append((position, position + length))
        position += length
    found = [match.span() for match in control.finditer(text)]
    for start, stop in found:
        if not any(low <= start and stop <= high for low, high in literals):
            raise _NotBetweenControls
    turns = []
    for span in spans:
        if span.pieces != ((span.start, span.stop),):
            raise _NotBetweenControls
        before = [i for i, (_, stop) in enumerate(found) if stop <= span.start]
        literal = next(((low, high) for low, high in literals if low <= span.start <= high), None)
        if not before or literal is None or found[before[-1]][0] < literal[0]:
            raise _NotBetweenControls
        begin = found[before[-1]][0]
        lead = encode(text[begin : span.start])[1:]
        if span.stop_start is None:
            if span.stop != len(text):
                raise _NotBetweenControls
            stop_control = None
        else:
            stop_control = next((i for i, place in enumerate(found) if place == (span.stop_start, span.stop)), None)
            if stop_control is None:
                raise _NotBetweenControls
        turns.append(Turn(span.message, before[-1], np.array(lead, np.uint32).tobytes(), stop_control))
    return tuple(turns), [id_of(text[start:stop]) for start, stop in found]


def _value(stretch: Text, inputs: Sequence[str]) -> str:
    if not stretch.is_expression:
        return stretch.value
    return Program(len(inputs), {}, (stretch,)).render(inputs) or ""
