"""One source, read again and again, encoded a little ahead of use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass, field
from typing import Any

from gym_data.preparing.batch import EncodedBatch, encode_chunk
from gym_data.preparing.documents import RowEncoder
from gym_data.sources.chunk import Chunk
from gym_data.sources.inputs import Position, open_input
from gym_data.sources.records import RecordReader
from gym_data.store.read import Document, DocumentRole
from gym_data.streaming.buffer import Group, ShuffleBuffer
from gym_sdk.errors import DataError, Where
from gym_sdk.spec.data import DataSource


@dataclass(frozen=True, slots=True)
class Place:
    """How far a source is read: the start of a chunk, and the groups of it that were taken.

    `taken` is None before the chunk is begun, that is, before the report counts its rows.
    """

    position: Position = field(default_factory=Position)
    taken: int | None = None
    passes: int = 0


class SourceStream:
    """The shuffled groups of a source, without end: after the last row it begins again, in another order."""

    def __init__(
        self,
        source: DataSource,
        encoder: RowEncoder,
        executor: Executor,
        *,
        seed: tuple[int, int],
        buffer_rows: int,
        count: Callable[[EncodedBatch], None],
        held_out: frozenset[bytes],
    ) -> None:
        """`count` hears of every chunk once; groups whose content is among `held_out` are left out.

        Encoding happens in `executor`, one chunk after another: it must have one thread.
        """
        self.source = source
        self.buffer: ShuffleBuffer = ShuffleBuffer(buffer_rows, seed)
        self.place: Place = Place()
        self.format: str | None = None if source.format == "auto" else source.format
        self.num_held_out: int = 0
        self._encoder = encoder
        self._executor = executor
        self._salt = seed[0].to_bytes(8, "little")
        self._count = count
        self._held_out = held_out
        self._reader = RecordReader(source)
        self._groups: Iterator[Group] | None = None

    def __next__(self) -> Group:
        group = self.buffer.pop(self._running())
        if group is None:
            self.place = Place(passes=self.place.passes + 1)
            self._groups = None
            group = self.buffer.pop(self._running())
        if group is None:
            raise DataError("no training row is left of this source", where=Where(file=self.source.source))
        return group

    def fill(self) -> None:
        """Fills the buffer without taking a row."""
        self.buffer.fill(self._running())

    def state(self) -> dict[str, Any]:
        """Where the source stands, as plain data. The buffer's rows are apart."""
        return {
            "place": asdict(self.place),
            "format": self.format,
            "random": self.buffer.random_state,
            "num_held_out": self.num_held_out,
        }

    def restore(self, state: dict[str, Any], rows: list[Group]) -> None:
        """Goes on where `state` was taken."""
        place = state["place"]
        self.place = Place(Position(**place["position"]), place["taken"], place["passes"])
        self.format = state["format"]
        self.num_held_out = state["num_held_out"]
        self.buffer.random_state = state["random"]
        self.buffer.slots = rows
        self._groups = None

    def _running(self) -> Iterator[Group]:
        if self._groups is None:
            self._groups = self._pass(self.place)
        return self._groups

    def _pass(self, start: Place) -> Iterator[Group]:
        """The groups from a place to the end of the pass. Keeps `self.place` at what was taken last."""
        for position, batch in self._encoded(start.position):
            is_resumed = start.taken is not None and position == start.position
            skipped = start.taken if is_resumed and start.taken is not None else 0
            if not is_resumed:
                self._count(batch)
            self._check(batch)
            for number, (content, group) in enumerate(groups_of(batch), 1):
                if number <= skipped:
                    continue
                self.place = Place(position, number, start.passes)
                if content in self._held_out:
                    self.num_held_out += 1
                    continue
                yield group
            self.place = Place(position, len(batch.group_sizes), start.passes)
        self._reader.check_not_empty()

    def _encoded(self, start: Position) -> Iterator[tuple[Position, EncodedBatch]]:
        """The chunks, encoded while the one before is in use."""
        waiting: tuple[Position, Future[EncodedBatch]] | None = None
        for position, chunk in open_input(self.source).chunks_from(start):
            following = (position, self._executor.submit(self._encode, chunk))
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = following
        if waiting is not None:
            yield waiting[0], waiting[1].result()

    def _encode(self, chunk: Chunk) -> EncodedBatch:
        batch = encode_chunk(chunk, self.source, self.format, self._encoder, self._salt)
        self.format = self.format or next(iter(batch.formats), None)
        return batch

    def _check(self, batch: EncodedBatch) -> None:
        for name, seen in batch.formats.items():
            self._reader.merge(name, seen)
        if self._reader.is_mixed:
            self._reader.raise_mixed()


def groups_of(batch: EncodedBatch) -> Iterator[tuple[bytes, Group]]:
    """The groups of a batch with the hash of their content, copied out so that none keeps the whole batch in memory."""
    document = token = 0
    for number, size in enumerate(batch.group_sizes.tolist()):
        documents = []
        for index in range(document, document + size):
            end = token + int(batch.lengths[index])
            documents.append(
                Document(
                    batch.tokens[token:end].copy(),
                    batch.loss_mask[token:end].copy(),
                    int(batch.rows[index]),
                    DocumentRole(int(batch.roles[index])),
                )
            )
            token = end
        document += size
        yield batch.hashes[number].tobytes(), tuple(documents)
