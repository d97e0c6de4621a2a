"""The rows of a run while it trains: every source shuffled, the sources mixed, and all of it resumable.

The state after any number of rows is small and exact: for each source the start of the chunk that is being read, how
many rows of it are taken, the rows in the shuffle buffer, and the random numbers. Restored, the stream goes on with
the very tokens that it would have given.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gym_data._json import dumps, loads
from gym_data._prepare import Progress, prepare
from gym_data.encoding.tokenizer import Tokenizer
from gym_data.packing.wrapped import Wrapper
from gym_data.preparing.adapt import template_of
from gym_data.preparing.batch import encode_chunk
from gym_data.preparing.counting import count_batch
from gym_data.preparing.documents import Objective, RowEncoder
from gym_data.rendering.template import clock_readings
from gym_data.report import DataReport, sample_of
from gym_data.sources.inputs import open_input
from gym_data.store.cache import cache_key
from gym_data.store.read import TokenStore
from gym_data.store.write import StoreWriter
from gym_data.streaming.buffer import Group
from gym_data.streaming.source import SourceStream
from gym_sdk.errors import DataError, Where
from gym_sdk.spec.data import DataSpec, EvalSplit

STATE_VERSION = 2
NUM_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class Preview:
    """What is known of the rows before training: of those in the shuffle buffers."""

    num_rows: int
    mean_row_tokens: float


@dataclass(frozen=True, slots=True)
class Streamed:
    """Data that is read while it trains."""

    train: RowStream
    eval: TokenStore | None
    preview: Preview

    @property
    def report(self) -> DataReport:
        """The account of the rows so far."""
        return self.train.report


def open_stream(
    data: DataSpec,
    folder: str | Path,
    *,
    cache_dir: str | Path,
    seed: int,
    objective: Objective | None = None,
    now: datetime | None = None,
    on_progress: Progress | None = None,
) -> Streamed:
    """The training rows as a stream, of which the shuffle buffers are filled, and the evaluation rows prepared.

    The parameters are those of `prepare`.
    """
    stream = RowStream(data, folder, seed=seed, objective=objective, now=now)
    evaluation = None
    if data.eval.sources:
        rows = data.model_copy(update={"train": data.eval.sources, "eval": EvalSplit()})
        kept = prepare(
            rows, folder, cache_dir=cache_dir, seed=seed, objective=objective, now=now, on_progress=on_progress
        )
        evaluation = kept.train
        stream.report.rows_eval = kept.report.rows_train
    return Streamed(stream, evaluation, stream.preview())


class RowStream:
    """Training rows without end, in groups of documents as a token store has them.

    Sources are drawn from in proportion to their weights; each is read from its start again when it is through. With
    `packing_strategy: wrapped` a row is a full block of text.
    """

    def __init__(
        self,
        data: DataSpec,
        folder: str | Path,
        *,
        seed: int,
        objective: Objective | None = None,
        now: datetime | None = None,
    ) -> None:
        """Reads nothing yet but the tokenizer in `folder`, samples of the sources, and the evaluation rows, which are
        left out of training. `now` is what a chat template is told when it asks for the date."""
        tokenizer = Tokenizer.from_folder(folder)
        encoder = RowEncoder(tokenizer, data, objective, now)
        digests = [open_input(source).quick_digest() for source in data.train]
        options = data.model_dump(mode="json", exclude={"num_workers", "packing"})
        readings = [text for source in encoder.templates for text in clock_readings(source, encoder.now)]
        key = cache_key(STATE_VERSION, options, digests, tokenizer.sha256, template_of(data), objective, seed, readings)
        self.report: DataReport = DataReport(
            fingerprint=key, moment=encoder.now.isoformat() if readings else "", streamed=True
        )
        self.report.sources = [
            {"source": source.source, "sampled_sha256": digest, "weight": source.weight}
            for source, digest in zip(data.train, digests, strict=True)
        ]
        self._tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(1, "gym-data-stream")
        held_out = _held_out(data, encoder, seed)
        self._sources = [
            SourceStream(
                source,
                encoder,
                self._executor,
                seed=(seed, index),
                buffer_rows=data.shuffle_buffer_rows,
                count=lambda batch: count_batch(self.report, batch),
                held_out=held_out,
            )
            for index, source in enumerate(data.train)
        ]
        weights = np.array([source.weight for source in data.train])
        self._shares: NDArray[np.float64] = weights / weights.sum()
        self._random = np.random.default_rng((seed, len(self._sources)))
        self._wrapper = Wrapper(data.max_length) if data.packing_strategy == "wrapped" else None

    def __iter__(self) -> RowStream:
        return self

    def __next__(self) -> Group:
        if self._wrapper is None:
            row = self._draw()
        else:
            while (row := self._wrapper.pop()) is None:
                (document,) = self._draw()
                self._wrapper.add(document)
        self.report.tokens += sum(len(document.ids) for document in row)
        self.report.trained_tokens += sum(int(np.count_nonzero(document.loss_mask)) for document in row)
        return row

    def preview(self) -> Preview:
        """Fills the shuffle buffers and says what is in them. Takes no row, and puts three samples into the report."""
        for source in self._sources:
            source.fill()
        for described, source in zip(self.report.sources, self._sources, strict=True):
            described["format"] = source.format
        rows = [row for source in self._sources for row in source.buffer.slots]
        if not rows:
            raise DataError("no training row is left", where=Where(file=self.report.sources[0]["source"]))
        documents = [document for row in islice(rows, NUM_SAMPLES) for document in row]
        self.report.samples = [
            sample_of(document.ids, document.loss_mask, self._tokenizer, f"row {document.row}")
            for document in documents[:NUM_SAMPLES]
        ]
        tokens = sum(len(document.ids) for row in rows for document in row)
        if self._wrapper is not None:
            return Preview(len(rows), float(self._wrapper.block_tokens))
        return Preview(len(rows), tokens / len(rows))

    def close(self) -> None:
        """Ends the encoding that goes on in the background."""
        self._executor.shutdown(cancel_futures=True)

    # State

    def save(self, folder: Path) -> None:
        """Writes where the stream stands into a folder of its own."""
        folder.mkdir(parents=True)
        for index, source in enumerate(self._sources):
            _write_rows(folder / f"source-{index}", source.buffer.slots)
        if self._wrapper is not None:
            _write_rows(folder / "rest", [(document,) for document in self._wrapper.rest])
        state = {
            "version": STATE_VERSION,
            "sources": [source.state() for source in self._sources],
            "random": self._random.bit_generator.state,
        }
        (folder / "state.json").write_text(dumps(state), encoding="utf-8")
        self.report.write(folder)

    def restore(self, folder: Path) -> None:
        """Goes on where `save` was called. Raises DataError for the state of other data."""
        try:
            state = loads((folder / "state.json").read_bytes())
            report = DataReport.from_json((folder / "report.json").read_bytes())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"the position in the data cannot be read: {error}", where=Where(file=str(folder))
            ) from None
        if report.fingerprint != self.report.fingerprint:
            raise DataError(
                "the data, the tokenizer or the template is not what the position belongs to",
                where=Where(file=str(folder)),
            )
        for index, (source, kept) in enumerate(zip(self._sources, state["sources"], strict=True)):
            source.restore(kept, _read_rows(folder / f"source-{index}"))
        if self._wrapper is not None:
            self._wrapper.rest = [document for (document,) in _read_rows(folder / "rest")]
        self._random.bit_generator.state = state["random"]
        self.report = report

    def _draw(self) -> Group:
        if len(self._sources) == 1:
            return next(self._sources[0])
        return next(self._sources[int(self._random.choice(len(self._sources), p=self._shares))])


def _held_out(data: DataSpec, encoder: RowEncoder, seed: int) -> frozenset[bytes]:
    """The content of the evaluation rows, as training would have them."""
    salt = seed.to_bytes(8, "little")
    return frozenset(
        row.tobytes()
        for source in data.eval.sources
        for chunk in open_input(source).chunks()
        for row in encode_chunk(chunk, source, None, encoder, salt).hashes
    )


def _write_rows(folder: Path, rows: list[Group]) -> None:
    with StoreWriter(folder) as writer:
        documents = [document for row in rows for document in row]
        if documents:
            writer.add_many(
                np.concatenate([document.ids for document in documents]),
                np.concatenate([document.loss_mask for document in documents]),
                np.array([len(document.ids) for document in documents]),
                np.array([document.row for document in documents]),
                np.array([document.role for document in documents]),
                np.array([len(row) for row in rows]),
            )


def _read_rows(folder: Path) -> list[Group]:
    store = TokenStore(folder)
    return [tuple(document.copied() for document in store.group(index)) for index in range(store.num_groups)]
