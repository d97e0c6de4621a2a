"""How fast chats become packed tokens, stage by stage, on one core."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gym_data.bench.made_up import write_chats
from gym_data.encoding.tokenizer import Tokenizer
from gym_data.packing import micro_batches
from gym_data.preparing.assemble import SourceStore
from gym_data.preparing.batch import encode_chunk
from gym_data.preparing.documents import RowEncoder
from gym_data.rendering.batch import BatchEncoder, Chat
from gym_data.sources.jsonl import jsonl_chunks
from gym_data.sources.records import RecordReader
from gym_sdk.spec.data import DataSource, DataSpec

REPETITIONS = 5
PACK_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class DataBench:
    """Tokens by CPU-second of one core; medians of interleaved repetitions. `raw` is `tokenizers` alone on the same
    texts, without offsets; the stages are those of the whole way."""

    rows: int
    tokens: int
    repetitions: int
    end_to_end_tokens_per_s: float
    raw_tokenizer_tokens_per_s: float
    end_to_end_share_of_raw: float
    """The median over repetitions of one divided by the other, measured next to each other."""
    read_tokens_per_s: float
    render_tokens_per_s: float
    encode_tokens_per_s: float
    pack_tokens_per_s: float
    quick_share: float
    """Of the chats, those encoded by a learned program."""
    tokenizer_path: str
    """The library that encoded: `tokenizers`, or `gigatoken` where it knows the tokenizer and passes the check."""
    fast_check: str
    """What the check of the fast way found."""

    def to_data(self) -> dict[str, Any]:
        """The figures for scripts."""
        return asdict(self)


def bench(
    folder: str | Path, file: str | Path | None = None, *, repetitions: int = REPETITIONS, fast: bool = True
) -> DataBench:
    """Measures with the tokenizer of a model folder, on a file of chats or on made-up ones (4,000, seeded).

    Without `fast`, `tokenizers` encodes even where `gigatoken` could.

    CPU time of this process is counted, so that other work on the machine disturbs little.
    """
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.allow_fast = fast
    with tempfile.TemporaryDirectory() as work:
        path = Path(file) if file is not None else write_chats(Path(work) / "chats.jsonl")
        source = DataSource(source=str(path))
        encoder = RowEncoder(tokenizer, DataSpec(train=[source], max_length=1 << 20))
        chunks = list(jsonl_chunks(str(path)))
        expected = next(iter(_formats(source, chunks)))
        records = [record for chunk in chunks for record in RecordReader(source, expected).records(chunk)]
        chats = [Chat(record, "all") for record in records]
        batch = BatchEncoder(encoder.renderer)
        texts = [encoder.renderer.render_training(record).rendered.text for record in records]
        batch.encode(chats)
        seconds: dict[str, list[float]] = {}

        def timed(stage: str, work_of: Callable[[], Any]) -> Any:
            start = time.process_time()
            result = work_of()
            seconds.setdefault(stage, []).append(time.process_time() - start)
            return result

        store = None
        for number in range(repetitions):
            target = Path(work) / f"store-{number}"
            timed("raw", lambda: tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False))
            store = timed(
                "whole",
                lambda target=target: _whole(target, str(path), source, expected, encoder),
            )
            timed("read", lambda: [list(RecordReader(source, expected).records(c)) for c in jsonl_chunks(str(path))])
            timed("render", lambda: [batch.text_of(chat) for chat in chats])
            timed("encode", lambda: tokenizer.encode_texts(texts))
            lengths = store.lengths
            timed("pack", lambda lengths=lengths: micro_batches(np.arange(len(lengths)), lengths, PACK_TOKENS))
        assert store is not None
        tokens = store.num_tokens
        rate = {stage: tokens / statistics.median(times) for stage, times in seconds.items()}
        before = batch.num_quick
        batch.encode(chats)
        return DataBench(
            rows=len(records),
            tokens=tokens,
            repetitions=repetitions,
            end_to_end_tokens_per_s=rate["whole"],
            raw_tokenizer_tokens_per_s=rate["raw"],
            end_to_end_share_of_raw=statistics.median(
                raw / whole for raw, whole in zip(seconds["raw"], seconds["whole"], strict=True)
            ),
            read_tokens_per_s=rate["read"],
            render_tokens_per_s=rate["render"],
            encode_tokens_per_s=rate["encode"],
            pack_tokens_per_s=rate["pack"],
            quick_share=(batch.num_quick - before) / len(chats),
            tokenizer_path=tokenizer.fast_check.path,
            fast_check=tokenizer.fast_check.found,
        )


def _whole(target: Path, path: str, source: DataSource, expected: str, encoder: RowEncoder) -> Any:
    """From the file to a store on disk, packed."""
    batches = (encode_chunk(chunk, source, expected, encoder, bytes(8)) for chunk in jsonl_chunks(path))
    store = SourceStore(target, batches).store
    micro_batches(np.arange(len(store)), store.lengths, PACK_TOKENS)
    return store


def _formats(source: DataSource, chunks: list[Any]) -> dict[str, Any]:
    reader = RecordReader(source)
    for chunk in chunks:
        reader.scan(chunk)
    if reader.is_mixed:
        reader.raise_mixed()
    reader.check_not_empty()
    return reader.seen
