"""Many chats at once: by learned programs where they fit, in full where not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gym_data.record import Message, Record
from gym_data.rendering.learned import ID_BYTES, Learned, Shape, learn, recorded_inputs, shape_of
from gym_data.rendering.messages import plain_messages
from gym_data.rendering.recorded import Recorder
from gym_data.rendering.renderer import ChatRenderer, RenderedChat, TrainOn, is_trained
from gym_data.rendering.template import TemplateFailed

MAX_PROGRAMS = 6
"""Programs of one shape: a template may treat chats of a shape in several ways."""
MAX_SHAPES = 4096


@dataclass(slots=True)
class EncodedChat:
    """`ids` [T] and `loss_mask` [T] of a chat, and what its rendering left out."""

    ids: NDArray[np.uint32]
    loss_mask: NDArray[np.uint8]
    left_out: tuple[str, ...]
    without_stop: bool


class Chat(NamedTuple):
    """A chat to encode."""

    record: Record
    train_on: TrainOn


class BatchEncoder:
    """Encodes chats as `ChatRenderer.encode_training` does, faster."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._learned: dict[Shape, list[Learned]] = {}
        self.num_quick: int = 0
        """Chats encoded by a learned program."""
        size = renderer.tokenizer.vocab_size
        self._is_control = np.zeros(size, bool)
        for text in renderer.control_tokens:
            self._is_control[renderer.tokenizer.id_of(text)] = True

    def encode(self, chats: Sequence[Chat]) -> list[EncodedChat]:
        """The chats, in order. Raises DataError for the first that cannot be rendered."""
        results: list[EncodedChat | None] = [None] * len(chats)
        quick: list[tuple[int, Learned]] = []
        texts: list[str] = []
        for index, chat in enumerate(chats):
            found = self.text_of(chat)
            if isinstance(found, EncodedChat):
                results[index] = found
            else:
                quick.append((index, found[0]))
                texts.append(found[1])
        if texts:
            self._mask(chats, quick, self._renderer.tokenizer.encode_texts(texts), results)
        return [result if result is not None else self._full(chats[i]) for i, result in enumerate(results)]

    def text_of(self, chat: Chat) -> tuple[Learned, str] | EncodedChat:
        """The program that fits and its text; the result of the full way where none does."""
        record = chat.record
        messages = record.messages
        shaped = shape_of(messages) if record.tools_json is None else None
        if shaped is None:
            return self._full(chat)
        shape, inputs = shaped
        programs = self._learned.get(shape)
        if programs is not None:
            for learned in programs:
                text = learned.render(inputs)
                if text is None:
                    continue
                if learned.is_due() and text != self._plain(messages):
                    learned.refuse()
                    continue
                return learned, text
            if len(programs) >= MAX_PROGRAMS:
                return self._full(chat)
        rendered = self._renderer.render_training(record, chat.train_on)
        if programs is None and len(self._learned) < MAX_SHAPES:
            programs = self._learned[shape] = []
        if programs is not None:
            learned = self._learn(shape, inputs, rendered)
            if learned is not None:
                programs.append(learned)
        return self._finish(chat, rendered)

    def _learn(self, shape: Shape, inputs: list[str], chat: RenderedChat) -> Learned | None:
        renderer = self._renderer
        if not renderer.main_template.can_be_followed:
            return None
        developer = renderer.plain_conventions.developer
        known: Shape = tuple((developer if role == "developer" else role, *rest) for role, *rest in shape)  # type: ignore[misc]

        def render(recorder: Recorder, count: int, prompt: bool) -> str:
            messages = recorded_inputs(known, inputs, recorder)
            return renderer.render_recorded(messages if count < 0 else messages[:count], prompt)

        return learn(
            inputs,
            render,
            chat.spans,
            chat.left_out,
            chat.rendered.text,
            renderer.control_pattern,
            lambda text: renderer.tokenizer.id_of(text) or 0,
            lambda text: renderer.tokenizer.encode(text, "allow"),
        )

    def _plain(self, messages: Sequence[Message]) -> str | None:
        try:
            return self._renderer.render_plain(plain_messages(messages, self._renderer.plain_conventions))
        except TemplateFailed:
            return None

    def _full(self, chat: Chat) -> EncodedChat:
        return self._finish(chat, self._renderer.render_training(chat.record, chat.train_on))

    def _finish(self, chat: Chat, rendered: RenderedChat) -> EncodedChat:
        encoded = self._renderer.encode_rendered(rendered, chat.record)
        without_stop = any(span.stop_start is None for span in rendered.spans)
        return EncodedChat(encoded.ids, encoded.loss_mask, rendered.left_out, without_stop)

    def _mask(
        self,
        chats: Sequence[Chat],
        quick: list[tuple[int, Learned]],
        encoded: tuple[NDArray[np.uint32], NDArray[np.int64]],
        results: list[EncodedChat | None],
    ) -> None:
        """Fills in the results whose control tokens are exactly the template's; leaves out the others."""
        ids, lengths = encoded
        # Bytes: to look at a few tokens of many rows, one row at a time, arrays take several times as long.
        ids_bytes, mask_bytes = ids.tobytes(), bytearray(len(ids))
        mask = np.frombuffer(mask_bytes, np.uint8)
        places = np.flatnonzero(np.take(self._is_control, ids))
        control_ids = ids[places].tolist()
        ends = np.cumsum(lengths)
        place_ends = np.searchsorted(places, ends).tolist()
        positions = places.tolist()
        first_place = start = 0
        for (index, learned), end, last_place in zip(quick, ends.tolist(), place_ends, strict=True):
            controls = control_ids[first_place:last_place]
            if controls == learned.controls and _mask_one(
                chats[index], learned, ids_bytes, mask_bytes, positions[first_place:last_place], end
            ):
                self.num_quick += 1
                results[index] = EncodedChat(ids[start:end], mask[start:end], learned.left_out, learned.without_stop)
            first_place, start = last_place, end


def _mask_one(
    chat: Chat, learned: Learned, ids_bytes: bytes, mask_bytes: bytearray, positions: list[int], end: int
) -> bool:
    """Marks the trained turns of a text whose control tokens are at `positions` and which ends at `end`."""
    messages = chat.record.messages
    num_prompt = len(chat.record.prompt)
    for turn in learned.turns:
        begin = positions[turn.start_control] + 1
        if turn.lead:
            if not ids_bytes.startswith(turn.lead, begin * ID_BYTES):
                return False  # the end of the generation prompt and the start of the answer became one token
            begin += len(turn.lead) // ID_BYTES
        if is_trained(messages, turn.message, chat.train_on, num_prompt):
            stop = end if turn.stop_control is None else positions[turn.stop_control] + 1
            mask_bytes[begin:stop] = b"\1" * (stop - begin)
    return True
