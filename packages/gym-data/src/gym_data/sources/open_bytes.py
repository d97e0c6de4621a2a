"""The bytes of a file, whatever it is compressed with and wherever it lies."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, Any

from gym_sdk.errors import DataError, MissingExtra, Where

COMPRESSIONS = (".gz", ".zst")


def suffix_of(uri: str) -> str:
    """The suffix that says what a file holds, compression aside: `.jsonl` of `rows.jsonl.gz`."""
    path = PurePosixPath(uri.split("?", 1)[0])
    return PurePosixPath(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSIONS else path.suffix.lower()


def compression_of(uri: str) -> str | None:
    """`.gz`, `.zst` or None."""
    suffix = PurePosixPath(uri.split("?", 1)[0]).suffix.lower()
    return suffix if suffix in COMPRESSIONS else None


@contextmanager
def open_bytes(uri: str) -> Iterator[IO[bytes]]:
    """The decompressed bytes of a path or URL. Errors of the file system and of the compression become DataError."""
    try:
        with _open_raw(uri) as raw, _decompressed(raw, compression_of(uri)) as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise read_error(uri, error) from None


@contextmanager
def open_stored(uri: str) -> Iterator[IO[bytes]]:
    """The bytes of a path or URL as they are stored, compressed or not."""
    try:
        with _open_raw(uri) as raw:
            yield raw
    except OSError as error:
        raise read_error(uri, error) from None


def skip_bytes(file: IO[bytes], count: int) -> None:
    """Moves on by `count` bytes from the start; what cannot be sought is read."""
    if file.seekable():
        file.seek(count)
        return
    while count > 0 and (data := file.read(min(count, 1 << 20))):
        count -= len(data)


def read_error(uri: str, error: Exception) -> DataError:
    """What went wrong while reading a file."""
    if isinstance(error, EOFError):
        message = "the file ends in the middle of its compressed data"
    elif isinstance(error, FileNotFoundError):
        message = "the data file does not exist"
    elif isinstance(error, IsADirectoryError):
        message = "is a folder"
    else:
        message = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    return DataError(message, where=Where(file=uri))


def is_url(uri: str) -> bool:
    """Whether a source is read through fsspec."""
    return "://" in uri


def _open_raw(uri: str) -> IO[bytes]:
    if not is_url(uri):
        return open(uri, "rb")
    try:
        import fsspec
    except ImportError:
        raise MissingExtra(f"reading {uri.split('://', 1)[0]}://", package="gym-data", extra="remote") from None
    try:
        opened: Any = fsspec.open(uri, "rb")
        return opened.open()
    except ImportError as error:
        raise DataError(f"the file system of this URL is not installed: {error}", where=Where(file=uri)) from None
    except ValueError as error:
        raise DataError(str(error), where=Where(file=uri)) from None


@contextmanager
def _decompressed(raw: IO[bytes], compression: str | None) -> Iterator[IO[bytes]]:
    if compression is None:
        yield raw
    elif compression == ".gz":
        with gzip.GzipFile(fileobj=raw) as file:
            yield file  # type: ignore[misc] - GzipFile reads bytes
    else:
        try:
            import zstandard
        except ImportError:
            raise MissingExtra("reading .zst files", package="gym-data", extra="tables") from None
        with io.BufferedReader(_ZstdReader(raw, zstandard), 1 << 20) as file:
            yield file


class _ZstdReader(io.RawIOBase):
    """The decompressed frames of a zstd file. The library's own reader takes a file cut short for a whole one."""

    def __init__(self, raw: IO[bytes], zstandard: Any) -> None:
        self._raw = raw
        self._zstandard = zstandard
        self._decompressor: Any = None
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            data = self._raw.read(1 << 18)
            if not data:
                if self._decompressor is not None:
                    raise EOFError
                return 0
            self._left = self._decompressed(data)
        part = self._left[: len(buffer)]
        buffer[: len(part)] = part
        self._left = self._left[len(part) :]
        return len(part)

    def _decompressed(self, data: bytes) -> bytes:
        found = []
        try:
            while data:
                decompressor = self._decompressor or self._zstandard.ZstdDecompressor().decompressobj()
                found.append(decompressor.decompress(data))
                self._decompressor = None if decompressor.eof else decompressor
                data = decompressor.unused_data if decompressor.eof else b""
        except self._zstandard.ZstdError as error:
            raise OSError(str(error)) from None
        return b"".join(found)
