"""From a record to documents: what a model sees as one sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gym_data.encoding.tokenizer import Tokenizer
from gym_data.formats.tokens import tokens_of
from gym_data.preparing.adapt import adapted, refuse_media, row_error, template_of
from gym_data.record import Candidate, Record, Source
from gym_data.rendering.batch import BatchEncoder, Chat, EncodedChat
from gym_data.rendering.renderer import ChatRenderer
from gym_data.store.read import DocumentRole
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


class EncodedDocument(NamedTuple):
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


@dataclass(slots=True)
class _Planned:
    """A row whose chats are still to be encoded: groups of chats with their roles."""

    row: EncodedRow
    groups: list[tuple[tuple[Chat, DocumentRole], ...]] = field(default_factory=list)


class RowEncoder:
    """Encodes records as a data specification says."""

    def __init__(
        self, tokenizer: Tokenizer, data: DataSpec, objective: Objective | None = None, now: datetime | None = None
    ) -> None:
        """`objective` is what the rows must be fit for; whatever they are when not given.

        `now` is the moment that a chat template is told when it asks for the date: one for all rows.
        """
        self.tokenizer = tokenizer
        self.data = data
        self.objective: Objective | None = objective
        self.now: datetime = now or datetime.now()
        self._adapts = data.thinking != "template" or data.system != "template"

    @property
    def templates(self) -> list[str]:
        """The chat templates that rows may be rendered with."""
        own = template_of(self.data)
        return [own] if own is not None else list(self.tokenizer.chat_templates.values())

    @cached_property
    def renderer(self) -> ChatRenderer:
        """The chat renderer; rows of text and tokens need none."""
        return ChatRenderer(
            self.tokenizer, template=template_of(self.data), options=dict(self.data.template_options), now=self.now
        )

    @cached_property
    def _batch(self) -> BatchEncoder:
        return BatchEncoder(self.renderer)

    def encode(self, records: Iterable[Record]) -> list[EncodedRow]:
        """The rows of `records`, in order. Raises DataError for the first record that cannot be used."""
        planned = [self._plan(record) for record in records]
        chats = [chat for plan in planned for group in plan.groups for chat, _ in group]
        encoded = iter(self._batch.encode(chats)) if chats else iter(())
        for plan in planned:
            for group in plan.groups:
                self._add_chats(plan.row, [(next(encoded), role) for _, role in group])
        return [plan.row for plan in planned]

    def _plan(self, record: Record) -> _Planned:
        """The chats that a record needs; rows that need none are finished at once."""
        objective = self._objective_of(record)
        plan = _Planned(EncodedRow(record.source, objective))
        if _has_empty_answer(record):
            plan.row.dropped = "an assistant turn without content, tool call or refusal"
            return plan
        if self.data.packing_strategy == "wrapped" and record.kind != "text":
            raise row_error(
                record,
                f"data.packing_strategy: wrapped cuts rows at any token, but this row is {_format(record)}",
                "It is for plain text; leave it out, and rows stay whole.",
            )
        if record.kind == "tokens":
            ids, mask = tokens_of(record)
            if int(ids.max()) >= self.tokenizer.vocab_size:
                message = f"token {int(ids.max())} is beyond the vocabulary of {self.tokenizer.vocab_size}"
                raise row_error(record, message)
            self._add(plan.row, (EncodedDocument(ids, mask),))
        elif record.kind == "text":
            self._add_text(plan.row, record)
        elif objective == "unpaired":
            for candidate in record.candidates:
                good = candidate.label if record.kind == "unpaired" else candidate.rank == 0
                role = DocumentRole.DESIRABLE if good else DocumentRole.UNDESIRABLE
                plan.groups.append(((self._completion(record, candidate), role),))
        elif objective == "preference":
            # The best candidate against each other one.
            ranked = sorted(record.candidates, key=lambda candidate: candidate.rank or 0)
            chosen = (self._completion(record, ranked[0]), DocumentRole.CHOSEN)
            plan.groups += [(chosen, (self._completion(record, other), DocumentRole.REJECTED)) for other in ranked[1:]]
        else:
            plan.groups.append(((Chat(self._chat(record), self.data.train_on), DocumentRole.PLAIN),))
        return plan

    def _objective_of(self, record: Record) -> Objective:
        found = _OBJECTIVE_OF.get(record.kind)
        if found is None:
            raise row_error(
                record,
                f"rows of the format {_format(record)} have nothing to learn from by likelihood",
                "They are for methods that sample and grade answers.",
            )
        wanted: Objective = self.objective or found
        if wanted == found or (wanted == "unpaired" and found == "preference"):
            return wanted
        raise row_error(record, f"the method needs {_NEEDS[wanted]}, but this row is {_format(record)}")

    def _completion(self, record: Record, candidate: Candidate) -> Chat:
        return Chat(self._chat(record._replace(candidates=(candidate,))), "completion")

    def _chat(self, record: Record) -> Record:
        """The record as the specification wants it rendered."""
        refuse_media(record)
        if not self._adapts:
            return record
        prompt = adapted(record.prompt, self.data, record)
        answers = tuple(
            Candidate(adapted(candidate.messages, self.data, record)) for candidate in record.candidates[:1]
        )
        return record._replace(prompt=prompt, candidates=answers)

    def _add_chats(self, row: EncodedRow, chats: Sequence[tuple[EncodedChat, DocumentRole]]) -> None:
        for chat, _ in chats:
            row.left_out += chat.left_out
            row.without_stop |= chat.without_stop
        documents = [EncodedDocument(chat.ids, chat.loss_mask, role) for chat, role in chats]
        if len(documents) == 2 and np.array_equal(documents[0].ids, documents[1].ids):
            row.dropped = "chosen and rejected are equal"
        else:
            self._add(row, documents)

    def _add_text(self, row: EncodedRow, record: Record) -> None:
        """BOS where the tokenizer adds one, the text, EOS; in pieces of at most `max_length`, or whole to wrap."""
        ids = self.tokenizer.encode(record.messages[0].text)
        start = [self.tokenizer.bos_id] if self.tokenizer.adds_bos and self.tokenizer.bos_id is not None else []
        whole = np.array([*start, *ids, *self.tokenizer.eos_ids[:1]], np.uint32)
        mask = np.ones(len(whole), np.uint8)
        mask[: len(start)] = 0
        if self.data.packing_strategy == "wrapped":
            row.groups.append((EncodedDocument(whole, mask),))
            return
        if len(whole) > self.data.max_length and self.data.overflow == "drop":
            row.dropped = f"longer than max_length {self.data.max_length}"
            return
        for begin in range(0, len(whole), self.data.max_length):
            end = begin + self.data.max_length
            self._add(row, (EncodedDocument(whole[begin:end], mask[begin:end]),))

    def _add(self, row: EncodedRow, documents: Sequence[EncodedDocument]) -> None:
        """Adds a group within `max_length`, or says why not."""
        limit = self.data.max_length
        longest = 0
        for document in documents:
            if not _has_targets(document.loss_mask):
                row.dropped = "no trained token"
                return
            longest = max(longest, len(document.ids))
        if longest > limit:
            if self.data.overflow == "drop":
                row.dropped = f"longer than max_length {limit}"
                return
            documents = [d._replace(ids=d.ids[:limit], loss_mask=d.loss_mask[:limit]) for d in documents]
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


def _has_targets(loss_mask: NDArray[Any]) -> bool:
    """Whether a token is predicted: the first one has nothing to be predicted from."""
    return loss_mask.tobytes().find(1, 1) > 0  # a fifth of the time of `any`


def _has_empty_answer(record: Record) -> bool:
    """An assistant's turn with nothing in it (`content: null` and no tool call): the model would learn to say nothing.

    An answer that is written as empty text is a choice, and so is a turn with `train: false`.
    """
    for messages in (record.prompt, *(candidate.messages for candidate in record.candidates)):
        for turn in messages:
            if not turn.parts and turn.role == "assistant" and turn.train is not False:
                return True
    return False


def _format(record: Record) -> str:
    return record.source.format if record.source else record.kind
