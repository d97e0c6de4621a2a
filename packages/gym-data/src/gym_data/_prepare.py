"""Records to token stores: the whole preparation of a run's data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gym_data.encoding.tokenizer import Tokenizer
from gym_data.record import Record
from gym_data.rendering.renderer import ChatRenderer, Encoded
from gym_data.report import DataReport, Dropped, LengthStats, Sample, SampleToken
from gym_data.sources.records import read_records
from gym_data.store.cache import cache_key, cached_folder, file_sha256
from gym_data.store.read import TokenStore
from gym_data.store.write import StoreWriter
from gym_sdk.errors import DataError
from gym_sdk.spec.data import DataSource, DataSpec

CODE_VERSION = 1
"""Raised whenever the same input prepares differently."""

Progress = Callable[[str, int, int | None], None]
"""`(stage, rows done, rows in all if known)`."""

NUM_SAMPLES = 3


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
    on_progress: Progress | None = None,
) -> Prepared:
    """Reads, renders, masks and tokenises the data of a run with the tokenizer in `folder`.

    The result is kept in `cache_dir` under a key of everything that it depends on: the bytes of the files, tokenizer
    and template, the options, the seed and the version of this code.
    """
    tokenizer = Tokenizer.from_folder(folder)
    progress = on_progress or (lambda stage, done, total: None)
    sources = [*data.train, *data.eval.sources]
    digests = []
    for index, source in enumerate(sources):
        progress("fingerprint", index, len(sources))
        path = Path(source.source).expanduser()
        if not path.is_file():
            next(read_records(source))  # raises what is wrong with it
        digests.append(file_sha256(path))
    key = cache_key(CODE_VERSION, data.model_dump(mode="json"), digests, tokenizer.sha256, seed)
    built, was_there = cached_folder(
        Path(cache_dir) / "prepared", key, lambda target: _build(target, data, tokenizer, seed, key, digests, progress)
    )
    report = DataReport.from_json((built / "report.json").read_bytes())
    report.from_cache = was_there
    train = TokenStore(built / "train")
    held_out = TokenStore(built / "eval") if (built / "eval").is_dir() else None
    return Prepared(train, held_out, report, built)


def _build(
    target: Path,
    data: DataSpec,
    tokenizer: Tokenizer,
    seed: int,
    key: str,
    digests: list[str],
    progress: Progress,
) -> None:
    renderer = ChatRenderer(tokenizer)
    report = DataReport(fingerprint=key)
    target.mkdir(parents=True)
    with StoreWriter(target / "all") as everything:
        hashes: list[bytes] = []
        for source in data.train:
            for encoded, record in _encoded(source, data, renderer, report, progress):
                hashes.append(_content_hash(encoded))
                everything.add(encoded.ids, encoded.loss_mask, record.source.row if record.source else 0)
    _require_rows(report, data, len(hashes))
    held_out = _held_out(hashes, data.eval.split, seed)
    with StoreWriter(target / "train") as train_writer:
        for index, document in enumerate(TokenStore(target / "all")):
            if not held_out[index]:
                train_writer.add(document.ids, document.loss_mask, document.row)
    if held_out.any() or data.eval.sources:
        with StoreWriter(target / "eval") as eval_writer:
            for index, document in enumerate(TokenStore(target / "all")):
                if held_out[index]:
                    eval_writer.add(document.ids, document.loss_mask, document.row)
            train_hashes = {digest for digest, out in zip(hashes, held_out, strict=True) if not out}
            for source in data.eval.sources:
                for encoded, record in _encoded(source, data, renderer, report, progress):
                    if _content_hash(encoded) in train_hashes:
                        report.drop("an evaluation row that is also a training row", _place(record))
                    else:
                        eval_writer.add(encoded.ids, encoded.loss_mask, record.source.row if record.source else 0)
            report.rows_eval = len(eval_writer)
    for name in ("tokens", "loss_mask", "offsets", "rows"):
        (target / "all" / f"{name}.bin").unlink()
    (target / "all" / "store.json").unlink()
    (target / "all").rmdir()
    train = TokenStore(target / "train")
    report.rows_train = len(train)
    report.tokens, report.trained_tokens = train.num_tokens, train.num_trained_tokens
    report.lengths = LengthStats.of(train.lengths)
    report.samples = [sample_of(train[i].ids, train[i].loss_mask, tokenizer, str(train[i].row)) for i in _shown(train)]
    report.sources = [
        {"source": source.source, "sha256": digest}
        for source, digest in zip([*data.train, *data.eval.sources], digests, strict=True)
    ]
    report.write(target)


def _encoded(
    source: DataSource, data: DataSpec, renderer: ChatRenderer, report: DataReport, progress: Progress
) -> Iterator[tuple[Encoded, Record]]:
    for record in read_records(source):
        report.rows_in += 1
        if report.rows_in % 256 == 0:
            progress("prepare", report.rows_in, None)
        chat = renderer.render_training(record, data.train_on)
        encoded = renderer.encode_rendered(chat, record)
        for field in chat.left_out:
            name = field.split(".", 1)[1]
            report.left_out.setdefault(name, Dropped()).add(_place(record))
        if not encoded.loss_mask.any():
            report.drop("no trained token", _place(record))
            continue
        if len(encoded.ids) > data.max_length:
            if data.overflow == "drop":
                report.drop(f"longer than max_length {data.max_length}", _place(record))
                continue
            encoded = Encoded(encoded.ids[: data.max_length], encoded.loss_mask[: data.max_length])
            if not encoded.loss_mask.any():
                report.drop(f"no trained token within max_length {data.max_length}", _place(record))
                continue
            report.rows_truncated += 1
        yield encoded, record


def _place(record: Record) -> str:
    return f"{record.source.uri}:{record.source.row}" if record.source else "?"


def _content_hash(encoded: Encoded) -> bytes:
    return hashlib.blake2b(encoded.ids.tobytes(), digest_size=16).digest()


def _require_rows(report: DataReport, data: DataSpec, used: int) -> None:
    if used:
        return
    reasons = "; ".join(f"{dropped.count} rows: {reason}" for reason, dropped in report.dropped.items())
    raise DataError(
        f"no training row is left of {report.rows_in} ({reasons})",
        hint=f"Raise data.max_length (now {data.max_length}), or check which turns the rows train.",
    )


def _held_out(hashes: list[bytes], share: float | None, seed: int) -> Any:
    """[N] bool: whole groups of equal rows, in an order of content and seed, until the share is reached."""
    out = np.zeros(len(hashes), bool)
    if not share:
        return out
    groups: dict[bytes, list[int]] = {}
    for index, digest in enumerate(hashes):
        groups.setdefault(digest, []).append(index)
    if len(groups) < 2:
        raise DataError("there is nothing to hold out: all rows are equal", hint="Drop data.eval.split or add rows.")
    salt = seed.to_bytes(8, "little")
    order = sorted(groups, key=lambda digest: hashlib.blake2b(digest, key=salt, digest_size=16).digest())
    wanted = max(1, round(share * len(hashes)))
    taken = 0
    for digest in order[: len(groups) - 1]:
        if taken >= wanted:
            break
        out[groups[digest]] = True
        taken += len(groups[digest])
    return out


def _shown(store: TokenStore) -> list[int]:
    """The shortest, a median and a long row: what goes wrong with masks shows at different lengths."""
    order = np.argsort(store.lengths, kind="stable")
    picks = [0, len(order) // 2, int(len(order) * 0.9)]
    return list(dict.fromkeys(int(order[pick]) for pick in picks))[:NUM_SAMPLES]


def sample_of(ids: Any, loss_mask: Any, tokenizer: Tokenizer, place: str) -> Sample:
    """A row's text in stretches of trained and untrained tokens."""
    edges = [0, *(np.flatnonzero(np.diff(loss_mask.astype(np.int8))) + 1), len(ids)]
    stretches = [SampleToken(tokenizer.decode(ids[a:b]), bool(loss_mask[a])) for a, b in pairwise(edges) if b > a]
    return Sample(place, tuple(stretches))
