"""Records to token stores: the whole preparation of a run's data."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_data.encoding.tokenizer import Tokenizer
from gym_data.packing import micro_batches
from gym_data.packing.wrapped import write_wrapped
from gym_data.preparing.adapt import template_of
from gym_data.preparing.assemble import SourceStore, held_out, is_in, write_training
from gym_data.preparing.batch import EncodedBatch, encode_chunk
from gym_data.preparing.counting import count_batch
from gym_data.preparing.documents import Objective, RowEncoder
from gym_data.preparing.workers import Setup, Workers
from gym_data.rendering.template import clock_readings
from gym_data.report import DataReport, LengthStats, Sample, sample_of
from gym_data.sources.chunk import Chunk
from gym_data.sources.inputs import open_input
from gym_data.sources.records import RecordReader
from gym_data.store.cache import cache_key, cached_folder
from gym_data.store.read import DocumentRole, TokenStore
from gym_data.store.write import StoreWriter
from gym_sdk.errors import DataError, Where
from gym_sdk.spec.data import DataSource, DataSpec

CODE_VERSION = 5
"""Raised whenever the same input prepares differently."""

Progress = Callable[[str, int, int | None, str], None]
"""`(stage, done, in all if known, unit)`."""

NUM_SAMPLES = 3
LARGE_BYTES = 32 << 20
"""From this size on, starting processes pays: they take about two seconds."""
MAX_WORKERS = 16
MAX_FILL_ROWS = 20_000
"""Rows from which the fill of packs is estimated."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Data ready for training."""

    train: TokenStore
    eval: TokenStore | None
    report: DataReport
    folder: Path


def prepare(
    data: DataSpec,
    folder: str | Path,
    *,
    cache_dir: str | Path,
    seed: int,
    objective: Objective | None = None,
    now: datetime | None = None,
    on_progress: Progress | None = None,
) -> Prepared:
    """Reads, renders, masks and tokenises the data of a run with the tokenizer in `folder`.

    `objective` says what the rows must be fit for; rows of another kind are an error before anything is trained. `now`
    is what a chat template is told when it asks for the date. The result is kept in `cache_dir` under a key of
    everything that it depends on: the bytes of the files, tokenizer and template, the date where the template writes
    it, the options, the seed and the version of this code.
    """
    tokenizer = Tokenizer.from_folder(folder)
    progress = on_progress or (lambda stage, done, total, unit: None)
    encoder = RowEncoder(tokenizer, data, objective, now)
    sources = [*data.train, *data.eval.sources]
    digests = []
    for index, source in enumerate(sources):
        progress("fingerprint", index, len(sources), "files")
        digests.append(open_input(source).digest())
    options = data.model_dump(mode="json", exclude={"num_workers", "packing", "streaming", "shuffle_buffer_rows"})
    readings = [text for template in encoder.templates for text in clock_readings(template, encoder.now)]
    key = cache_key(CODE_VERSION, options, digests, tokenizer.sha256, template_of(data), objective, seed, readings)
    report = DataReport(fingerprint=key, moment=encoder.now.isoformat() if readings else "")
    build = _Build(data, encoder, seed, digests, report, progress)
    built, was_there = cached_folder(Path(cache_dir) / "prepared", key, build.run)
    report = DataReport.from_json((built / "report.json").read_bytes())
    report.from_cache = was_there
    train = TokenStore(built / "train")
    evaluation = TokenStore(built / "eval") if (built / "eval").is_dir() else None
    return Prepared(train, evaluation, report, built)


class _Build:
    """One preparation, into a folder of its own."""

    def __init__(
        self,
        data: DataSpec,
        encoder: RowEncoder,
        seed: int,
        digests: list[str],
        report: DataReport,
        progress: Progress,
    ) -> None:
        self.data = data
        self.tokenizer = encoder.tokenizer
        self.seed = seed
        self.digests = digests
        self.progress = progress
        self.encoder = encoder
        self.report = report

    def run(self, target: Path) -> None:
        target.mkdir(parents=True)
        report = self.report
        read = [
            SourceStore(target / f"source-{i}", self._batches(source, is_eval=False))
            for i, source in enumerate(self.data.train)
        ]
        self._require_rows(sum(source.num_groups for source in read))
        kept = self._kept(read)
        self._write_eval(target, read, kept)
        weights = [source.weight for source in self.data.train]
        write_training(target / "train", list(zip(read, kept, weights, strict=True)), self.seed)
        for source in read:
            source.remove()
        report.rows_train -= report.rows_eval_split
        train = TokenStore(target / "train")
        if not train.num_groups:
            raise DataError(
                f"no training row is left of {report.rows_in}: data.train[].weight or data.eval.split takes all",
                where=Where(file=self.data.train[0].source),
                hint="raise the weight or lower the split, so that at least one row is trained",
            )
        report.lengths = LengthStats.of(train.lengths)
        if self.data.packing_strategy == "wrapped":
            train = self._wrapped(target / "train")
            if (target / "eval").is_dir():
                self._wrapped(target / "eval")
        report.tokens, report.trained_tokens = train.num_tokens, train.num_trained_tokens
        report.pack_fill = fill_of(train.group_lengths, self.data.max_length)
        report.samples = [self._sample(train, index) for index in _shown(train)]
        self._check_labels(train)
        report.write(target)
        (target / "card.md").write_text(report.card(), encoding="utf-8")

    def _batches(self, source: DataSource, *, is_eval: bool) -> Iterator[EncodedBatch]:
        """The encoded chunks of a source, with their counts in the report."""
        opened = open_input(source)
        reader = RecordReader(source)
        salt = self.seed.to_bytes(8, "little")
        expected: str | None = None
        chunks = opened.chunks()
        rows = 0
        for batch in self._encoded(opened, chunks, source, salt):
            for name, seen in batch.formats.items():
                reader.merge(name, seen)
            if reader.is_mixed:
                for rest in chunks:
                    reader.scan(rest)
                reader.raise_mixed()
            expected = next(iter(reader.seen), None)
            rows += batch.num_rows
            count_batch(self.report, batch, is_eval=is_eval)
            self.progress("prepare", self.report.rows_in, None, "rows")
            yield batch
        reader.check_not_empty()
        index = len(self.report.sources)
        self.report.sources.append(
            {
                "source": source.source,
                "format": expected,
                "rows": rows,
                "sha256": self.digests[index],
                "weight": source.weight,
            }
        )

    def _encoded(self, opened: Any, chunks: Iterator[Chunk], source: DataSource, salt: bytes) -> Iterator[EncodedBatch]:
        """The first chunk here, which tells the format; the rest in other processes where that pays."""
        first = next(chunks, None)
        if first is None:
            return
        batch = encode_chunk(first, source, None, self.encoder, salt)
        yield batch
        expected = next(iter(batch.formats), None)
        count = num_workers(self.data, opened.size_bytes)
        if count < 2 or self.tokenizer.folder is None:
            for chunk in chunks:
                yield encode_chunk(chunk, source, expected, self.encoder, salt)
            return
        setup = Setup(self.tokenizer.folder, self.data, self.encoder.objective, salt, self.encoder.now)
        with Workers(setup, count) as workers:
            yield from workers.encode(chunks, source, expected)

    def _kept(self, read: list[SourceStore]) -> list[NDArray[np.bool_]]:
        """[G] of each source: the groups that are not held out."""
        if not self.data.eval.split:
            return [np.ones(source.num_groups, np.bool_) for source in read]
        out = held_out(np.concatenate([source.hashes for source in read]), self.data.eval.split)
        edges = np.cumsum([0, *(source.num_groups for source in read)])
        return [~out[a:b] for a, b in pairwise(edges)]

    def _write_eval(self, target: Path, read: list[SourceStore], kept: list[NDArray[np.bool_]]) -> None:
        if not self.data.eval.sources and not self.data.eval.split:
            return
        with StoreWriter(target / "eval") as writer:
            for source, keep in zip(read, kept, strict=True):
                store = source.store
                writer.add_groups(store, np.flatnonzero(~keep))
                # Rows of text may be several groups; a row counts as held out when its last piece is.
                self.report.rows_eval_split += _num_rows(store, ~keep)
            self.report.rows_eval += self.report.rows_eval_split
            training = np.concatenate([source.hashes[keep] for source, keep in zip(read, kept, strict=True)])
            for index, spec in enumerate(self.data.eval.sources):
                source = SourceStore(target / f"source-eval-{index}", self._batches(spec, is_eval=True))
                repeated = is_in(source.hashes, training)
                writer.add_groups(source.store, np.flatnonzero(~repeated))
                rows = source.store.rows[source.store.groups[:-1]][repeated]
                for row in rows:
                    self.report.drop("an evaluation row that is also a training row", f"{spec.source}:{row}")
                self.report.rows_eval -= len(rows)
                source.remove()

    def _wrapped(self, folder: Path) -> TokenStore:
        """The store in blocks of `max_length` tokens, in the place of its documents."""
        documents = folder.rename(folder.with_name(f"{folder.name}-documents"))
        with StoreWriter(folder) as writer:
            write_wrapped(TokenStore(documents), writer, self.data.max_length)
        shutil.rmtree(documents)
        return TokenStore(folder)

    def _require_rows(self, groups: int) -> None:
        if groups:
            return
        reasons = "; ".join(f"{dropped.count} rows: {reason}" for reason, dropped in self.report.dropped.items())
        raise DataError(
            f"no training row is left of {self.report.rows_in} ({reasons})",
            where=Where(file=self.data.train[0].source),
            hint=f"Raise data.max_length (now {self.data.max_length}), or check which turns the rows train.",
        )

    def _check_labels(self, train: TokenStore) -> None:
        if self.report.objective != "unpaired":
            return
        good = int(np.count_nonzero(train.roles == DocumentRole.DESIRABLE))
        self.report.labels = {"desirable": good, "undesirable": len(train) - good}
        if good in (0, len(train)):
            raise DataError(
                f"all {len(train)} labels are {'true' if good else 'false'}: KTO learns from good and bad answers",
                where=Where(file=self.data.train[0].source),
                hint="Add rows of the other kind, or fine-tune on the good answers (method: {kind: sft}).",
            )

    def _sample(self, train: TokenStore, index: int) -> Sample:
        document = train[index]
        return sample_of(document.ids, document.loss_mask, self.tokenizer, f"row {document.row}")


def num_workers(data: DataSpec, size_bytes: int | None) -> int:
    """How many processes encode a source of this size."""
    if data.num_workers is not None:
        return data.num_workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS) if size_bytes and size_bytes >= LARGE_BYTES else 0


def fill_of(lengths: NDArray[np.int64], pack_tokens: int) -> float:
    """The share of packs that rows fill, packed best-fit: of a sample where there are many rows."""
    if not len(lengths):
        return 0.0
    sample = np.asarray(lengths[:: max(1, -(-len(lengths) // MAX_FILL_ROWS))])
    packs = micro_batches(np.arange(len(sample)), sample, pack_tokens)
    # A row that is longer than a pack (a pair may be) has one of its own.
    room = sum(max(pack_tokens, int(sample[rows].sum())) for rows in packs)
    return round(int(sample.sum()) / room, 4)


def _num_rows(store: TokenStore, chosen: Any) -> int:
    """How many distinct rows the chosen groups came from."""
    rows = store.rows[store.groups[:-1]][chosen]
    return int(np.count_nonzero(np.diff(rows, prepend=-1)))


def _shown(store: TokenStore) -> list[int]:
    """A short, a median and a long document: what goes wrong with masks shows at different lengths."""
    order = np.argsort(store.lengths, kind="stable")
    picks = [0, len(order) // 2, int(len(order) * 0.9)]
    return list(dict.fromkeys(int(order[pick]) for pick in picks))[:NUM_SAMPLES]
