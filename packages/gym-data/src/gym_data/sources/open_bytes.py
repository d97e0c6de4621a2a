"""The bytes of a file, whatever it is compressed with and wherever it lies."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO

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


def read_error(uri: str, error: Exception) -> DataError:
    """What went wrong while reading a file."""
    if isinstance(error, EOFError):
        message = "the file ends in the middle of its compressed data"
    elif isinstance(error, FileNotFoundError):
        message = "the data file does not exist"
    elif isinstance(error, IsADirectoryError):
        message = "is a folder"
    else:
        message = f"cannot be read: {error}"
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
        return fsspec.open(uri, "rb").open()
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
        try:
            with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as file:
                yield file
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from None
