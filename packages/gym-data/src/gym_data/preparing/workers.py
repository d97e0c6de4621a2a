"""Encoding chunks in several processes, with the results in order.

The processes are plain commands fed over pipes: unlike those of `multiprocessing` they import nothing of the caller's
program, and they end when their input does, whatever happens to the parent.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any

from gym_data.encoding.tokenizer import Tokenizer
from gym_data.preparing.batch import EncodedBatch, encode_chunk
from gym_data.preparing.documents import Objective, RowEncoder
from gym_data.sources.chunk import Chunk
from gym_sdk.errors import GymError, RunFailed
from gym_sdk.spec.data import DataSource, DataSpec

AHEAD = 2
"""Chunks waiting for each process."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a process needs to know once."""

    folder: str
    data: DataSpec
    objective: Objective | None
    salt: bytes
    now: datetime


class Workers:
    """`count` processes that encode chunks."""

    def __init__(self, setup: Setup, count: int) -> None:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "gym_data.preparing.workers"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            for _ in range(count)
        ]
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for process in self._processes:
            _send(process.stdin, setup)
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(count)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=kind is None, cancel_futures=True)
        for process in self._processes:
            if kind is not None:
                process.kill()
            elif process.stdin is not None:
                process.stdin.close()
            process.wait()
        self._threads.shutdown()

    def encode(self, chunks: Iterable[Chunk], source: DataSource, expected: str | None) -> Iterator[EncodedBatch]:
        """The encoded chunks, in order. Raises DataError for the first row that cannot be used."""
        waiting: deque[Future[EncodedBatch]] = deque()
        for chunk in chunks:
            waiting.append(self._threads.submit(self._one, chunk, source, expected))
            if len(waiting) > AHEAD * len(self._processes):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _one(self, chunk: Chunk, source: DataSource, expected: str | None) -> EncodedBatch:
        process = self._idle.get()
        try:
            _send(process.stdin, (chunk, source, expected))
            result = _receive(process.stdout)
        except (OSError, EOFError):
            raise RunFailed(
                f"a preparing process ended with status {process.poll()}",
                hint="Memory may have run out; set data.num_workers: 0.",
            ) from None
        finally:
            self._idle.put(process)
        if isinstance(result, _Failed):
            raise result.kind(result.message, where=result.where, hint=result.hint)
        return result


@dataclass(frozen=True, slots=True)
class _Failed:
    """An error on its way between processes."""

    kind: type[GymError]
    message: str
    where: Any
    hint: str | None


def _send(pipe: IO[bytes] | None, value: Any) -> None:
    assert pipe is not None
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    pipe.write(struct.pack("<Q", len(data)))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes] | None) -> Any:
    assert pipe is not None
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    (size,) = struct.unpack("<Q", head)
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)


def serve() -> None:
    """The life of a worker: a setup, then chunks until the input ends."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not reach the parent as a result
    try:
        setup: Setup = _receive(sys.stdin.buffer)
        encoder = RowEncoder(Tokenizer.from_folder(setup.folder), setup.data, setup.objective, setup.now)
        while True:
            chunk, source, expected = _receive(sys.stdin.buffer)
            try:
                result: Any = encode_chunk(chunk, source, expected, encoder, setup.salt)
            except GymError as error:
                result = _Failed(type(error), error.message, error.where, error.hint)
            _send(output, result)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return


if __name__ == "__main__":
    # Run as a module, this file is `__main__`; the classes in the pipes are those of the package.
    from gym_data.preparing import workers

    workers.serve()
