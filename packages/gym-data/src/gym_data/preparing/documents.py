"""From a record to documents: what a model sees as one sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gym_data.encoding.tokenizer import Tokenizer
from gym_data.formats.tokens import tokens_of
from gym_data.record import MEDIA_TYPES, Candidate, Message, Part, Record, Source
from gym_data.rendering.renderer import ChatRenderer, TrainOn
from gym_data.store.read import DocumentRole
from gym_sdk.errors import DataError, Where
from gym_sdk.spec.data import DataSpec

Objective = Literal["sft", "preference", "unpaired"]
"""What rows are prepared for: plain likelihood, pairs, or labelled answers."""

_OBJECTIVE_OF: dict[str, Objective] = {
    "chat": "sft",
    "text": "sft",
    "tokens": "sft",
    "preference": "preference",
    "unpaired": "unpaired",
}


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """`ids` [T] and `loss_mask` [T] of one sequence, and its part in the row."""

    ids: NDArray[np.uint32]
    loss_mask: NDArray[np.uint8]
    role: DocumentRole = DocumentRole.PLAIN


@dataclass(slots=True)
class EncodedRow:
    """What became of a record: groups of documents that belong together, or the reason why there are none."""

    source: Source | None
    objective: Objective
    groups: list[tuple[EncodedDocument, ...]] = field(default_factory=list)
    dropped: str | None = None
    truncated: bool = False
    left_out: tuple[str, ...] = ()
    without_stop: bool = False


class RowEncoder:
    """Encodes records as a data specification says."""

    def __init__(self, tokenizer: Tokenizer, data: DataSpec, objective: Objective | None = None) -> None:
        """`objective` is what the rows must be fit for; whatever they are when not given."""
        self.tokenizer = tokenizer
        self.data = data
        self.objective = objective

    @cached_property
    def renderer(self) -> ChatRenderer:
        """The chat renderer; rows of text and tokens need none."""
        return ChatRenderer(self.tokenizer, template=template_of(self.data), options=dict(self.data.template_options))

    def encode(self, records: Iterable[Record]) -> list[EncodedRow]:
        """The rows of `records`, in order. Raises DataError for a record that cannot be used."""
        return [self._encode(record) for record in records]

    def _encode(self, record: Record) -> EncodedRow:
        objective = self._objective_of(record)
        row = EncodedRow(record.source, objective)
        if record.kind == "tokens":
            ids, mask = tokens_of(record)
            if int(ids.max()) >= self.tokenizer.vocab_size:
                raise _error(record, f"token {int(ids.max())} is beyond the vocabulary of {self.tokenizer.vocab_size}")
            self._add(row, (EncodedDocument(ids, mask),))
        elif record.kind == "text":
            self._add_text(row, record)
        elif objective == "unpaired":
            for candidate in record.candidates:
                good = candidate.label if record.kind == "unpaired" else candidate.rank == 0
                role = DocumentRole.DESIRABLE if good else DocumentRole.UNDESIRABLE
                self._add(row, (self._chat(row, record, candidate, "completion", role),))
        elif objective == "preference":
            self._add_pairs(row, record)
        else:
            chat = self._chat(row, record, record.candidates[0] if record.candidates else None, self.data.train_on)
            self._add(row, (chat,))
        return row

    def _objective_of(self, record: Record) -> Objective:
        found = _OBJECTIVE_OF.get(record.kind)
        wanted = self.objective or found
        if found is None:
            raise _error(
                record,
                f"rows of the format {_format(record)} have nothing to learn from by likelihood",
                "They are for methods that sample and grade answers.",
            )
        if wanted == found or (wanted == "unpaired" and found == "preference"):
            return wanted
        raise _error(record, f"the method needs {_NEEDS[wanted]}, but this row is {_format(record)}")

    def _chat(
        self,
        row: EncodedRow,
        record: Record,
        candidate: Candidate | None,
        train_on: TrainOn,
        role: DocumentRole = DocumentRole.PLAIN,
    ) -> EncodedDocument:
        answer = candidate.messages if candidate else ()
        refuse_media(record)
        prompt = adapted(record.prompt, self.data, record)
        # Only a message of its own may be merged into: what stands after the prompt starts with an answer.
        candidates = (Candidate(adapted(answer, self.data, record)),) if answer else ()
        chat = replace(record, prompt=prompt, candidates=candidates)
        rendered = self.renderer.render_training(chat, train_on)
        row.left_out += rendered.left_out
        row.without_stop |= any(span.stop_start is None for span in rendered.spans)
        encoded = self.renderer.encode_rendered(rendered, chat)
        return EncodedDocument(encoded.ids, encoded.loss_mask, role)

    def _add_pairs(self, row: EncodedRow, record: Record) -> None:
        """The best candidate against each other one."""
        ranked = sorted(record.candidates, key=lambda candidate: candidate.rank or 0)
        chosen = self._chat(row, record, ranked[0], "completion", DocumentRole.CHOSEN)
        for other in ranked[1:]:
            rejected = self._chat(row, record, other, "completion", DocumentRole.REJECTED)
            if np.array_equal(chosen.ids, rejected.ids):
                row.dropped = "chosen and rejected are equal"
            else:
                self._add(row, (chosen, rejected))

    def _add_text(self, row: EncodedRow, record: Record) -> None:
        """BOS where the tokenizer adds one, the text, EOS; in pieces of at most `max_length`."""
        ids = self.tokenizer.encode(record.messages[0].text)
        start = [self.tokenizer.bos_id] if self.tokenizer.adds_bos and self.tokenizer.bos_id is not None else []
        whole = np.array([*start, *ids, *self.tokenizer.eos_ids[:1]], np.uint32)
        mask = np.ones(len(whole), np.uint8)
        mask[: len(start)] = 0
        if len(whole) > self.data.max_length and self.data.overflow == "drop":
            row.dropped = f"longer than max_length {self.data.max_length}"
            return
        for begin in range(0, len(whole), self.data.max_length):
            end = begin + self.data.max_length
            self._add(row, (EncodedDocument(whole[begin:end], mask[begin:end]),))

    def _add(self, row: EncodedRow, documents: Sequence[EncodedDocument]) -> None:
        """Adds a group within `max_length`, or says why not."""
        limit = self.data.max_length
        if not all(_has_targets(document.loss_mask) for document in documents):
            row.dropped = "no trained token"
            return
        if any(len(document.ids) > limit for document in documents):
            if self.data.overflow == "drop":
                row.dropped = f"longer than max_length {limit}"
                return
            documents = [replace(d, ids=d.ids[:limit], loss_mask=d.loss_mask[:limit]) for d in documents]
            if not all(_has_targets(document.loss_mask) for document in documents):
                row.dropped = f"no trained token within max_length {limit}"
                return
            row.truncated = True
        row.groups.append(tuple(documents))


_NEEDS: dict[Objective, str] = {
    "sft": "chats or text",
    "preference": "pairs of chosen and rejected answers",
    "unpaired": "answers with a label, good or bad",
}


def template_of(data: DataSpec) -> str | None:
    """The text of `data.chat_template`."""
    if data.chat_template is None:
        return None
    try:
        return Path(data.chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the chat template cannot be read: {error}", where=Where(file=data.chat_template)) from None


def adapted(messages: tuple[Message, ...], data: DataSpec, record: Record) -> tuple[Message, ...]:
    """Messages as `data.thinking` and `data.system` want them."""
    if data.thinking == "drop":
        messages = tuple(
            replace(message, parts=tuple(part for part in message.parts if part.type != "reasoning"))
            for message in messages
        )
    systems = [message for message in messages if message.role in ("system", "developer")]
    if data.system == "template" or not systems:
        return messages
    rest = tuple(message for message in messages if message.role not in ("system", "developer"))
    if data.system == "drop":
        return rest
    first = next((i for i, message in enumerate(rest) if message.role == "user"), None)
    if first is None:
        raise _error(record, "there is no user's turn to merge the system turn into")
    text = "\n\n".join(message.text for message in systems)
    merged = replace(rest[first], parts=(Part("text", f"{text}\n\n"), *rest[first].parts))
    return (*rest[:first], merged, *rest[first + 1 :])


def refuse_media(record: Record) -> None:
    """Raises DataError for a row with images, audio or video."""
    for message in (*record.prompt, *(m for candidate in record.candidates for m in candidate.messages)):
        for part in message.parts:
            if part.type in MEDIA_TYPES:
                raise _error(
                    record,
                    f"the row has {part.type} content, which is not trained on",
                    "Such rows can be inspected, validated, converted and split; take them out before training.",
                )


def _has_targets(loss_mask: NDArray[Any]) -> bool:
    """Whether a token is predicted: the first one has nothing to be predicted from."""
    return bool(loss_mask[1:].any())


def _format(record: Record) -> str:
    return record.source.format if record.source else record.kind


def _error(record: Record, message: str, hint: str | None = None) -> DataError:
    place = Where(file=record.source.uri, line=record.source.row) if record.source else None
    return DataError(message, where=place, hint=hint)
