"""What a second core brings: whole preparations by one process and by two, in turns."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gym_data._prepare import prepare
from gym_data.bench.made_up import write_chats
from gym_sdk.spec.data import DataSource, DataSpec

REPETITIONS = 7
FILE_BYTES = 48 << 20


@dataclass(frozen=True, slots=True)
class CoresBench:
    """Wall-clock time: both cores are needed, so other work on the machine spoils it."""

    file_bytes: int
    tokens: int
    repetitions: int
    one_core_tokens_per_s: float
    two_cores_tokens_per_s: float
    two_cores_speedup: float
    """The median over repetitions of one time divided by the other, measured next to each other."""
    speedups: tuple[float, ...]


def bench_cores(folder: str | Path, file: str | Path | None = None, *, repetitions: int = REPETITIONS) -> CoresBench:
    """Measures `prepare` from the file to the stores, digest and start of the processes included."""
    times: dict[int, list[float]] = {0: [], 2: []}
    tokens = 0
    with _one_thread_a_process(), tempfile.TemporaryDirectory() as work:
        path = Path(file) if file is not None else write_chats(Path(work) / "chats.jsonl", num_bytes=FILE_BYTES)
        for number in range(repetitions):
            # Which one comes first changes, so that neither always finds the machine as the other left it.
            for count in (0, 2) if number % 2 else (2, 0):
                data = DataSpec(train=[DataSource(source=str(path))], num_workers=count)
                with tempfile.TemporaryDirectory(dir=work) as cache:
                    start = time.perf_counter()
                    tokens = prepare(data, folder, cache_dir=cache, seed=0).report.tokens
                    times[count].append(time.perf_counter() - start)
        speedups = tuple(one / two for one, two in zip(times[0], times[2], strict=True))
        return CoresBench(
            file_bytes=path.stat().st_size,
            tokens=tokens,
            repetitions=repetitions,
            one_core_tokens_per_s=tokens / statistics.median(times[0]),
            two_cores_tokens_per_s=tokens / statistics.median(times[2]),
            two_cores_speedup=statistics.median(speedups),
            speedups=speedups,
        )


@contextmanager
def _one_thread_a_process() -> Iterator[None]:
    """`tokenizers` takes every core by itself where only one process encodes, which is not one core."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
