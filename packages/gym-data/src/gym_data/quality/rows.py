"""Rows beside their records, and the account of what a tool did with them."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gym_data._json import dumps
from gym_data.formats import format_named
from gym_data.record import Message, Record
from gym_data.report import Dropped
from gym_data.sources.records import read_records
from gym_sdk.errors import DataError, OutputInUse, Where
from gym_sdk.spec.data import DataSource


@dataclass(slots=True)
class Account:
    """Rows in = kept + dropped. `changed` counts among the kept."""

    rows_in: int = 0
    kept: int = 0
    changed: int = 0
    dropped: dict[str, Dropped] = field(default_factory=dict)

    def keep(self, *, changed: bool = False) -> None:
        """Counts a row that goes on."""
        self.rows_in += 1
        self.kept += 1
        self.changed += changed

    def drop(self, reason: str, record: Record) -> None:
        """Counts a row that does not."""
        self.rows_in += 1
        self.dropped.setdefault(reason, Dropped()).add(place_of(record))

    def to_data(self) -> dict[str, Any]:
        """The account for scripts."""
        dropped = {reason: {"count": item.count, "lines": item.lines} for reason, item in self.dropped.items()}
        return {"rows_in": self.rows_in, "kept": self.kept, "changed": self.changed, "dropped": dropped}

    def lines(self) -> list[str]:
        """The account for people."""
        changed = f" ({self.changed} changed)" if self.changed else ""
        num_dropped = sum(item.count for item in self.dropped.values())
        lines = [f"{self.rows_in} rows in, {self.kept} kept{changed}, {num_dropped} dropped"]
        for reason, item in self.dropped.items():
            more = ", ..." if item.count > 5 else ""
            lines.append(f"  {item.count} dropped: {reason} ({', '.join(item.lines[:5])}{more})")
        return lines


def place_of(record: Record) -> str:
    """`file:line`."""
    return f"{record.source.uri}:{record.source.row}" if record.source else "?"


def read_all(sources: list[DataSource]) -> Iterator[Record]:
    """The records of several sources, one after another."""
    for source in sources:
        yield from read_records(source)


def row_of(record: Record) -> dict[str, Any]:
    """The row that the record came from."""
    return format_named(record.source.format if record.source else "openai").export(record)


def every_message(record: Record) -> tuple[Message, ...]:
    """The prompt and all candidates."""
    return (*record.prompt, *(message for candidate in record.candidates for message in candidate.messages))


def text_of(record: Record) -> str:
    """All texts of a record, a line each."""
    texts = [part.text for message in every_message(record) for part in message.parts if part.text]
    calls = [f"{call.name} {call.arguments_json}" for message in every_message(record) for call in message.calls]
    return "\n".join((*texts, *calls))


def content_key(record: Record) -> bytes:
    """16 bytes that are equal for records that say the same, whatever they are called and wherever they came from."""
    bare = record._replace(
        id=None, source=None, weight=None, meta_json=record.meta_json if not record.messages else None
    )
    return hashlib.blake2b(repr(bare).encode("utf-8", "surrogatepass"), digest_size=16).digest()


@contextmanager
def writing(path: Path, *, force: bool = False) -> Iterator[IO[bytes]]:
    """A file that appears whole or not at all. Raises OutputInUse when it is there already."""
    if path.exists() and not force:
        raise OutputInUse("the output file exists", where=Where(file=str(path)), hint="Name another, or add --force.")
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise DataError(f"cannot be written: {error.strerror}", where=Where(file=str(path))) from None
    finally:
        unfinished.unlink(missing_ok=True)


def write_row(file: IO[bytes], row: dict[str, Any]) -> None:
    """One line of JSON Lines."""
    file.write(dumps(row).encode("utf-8"))
    file.write(b"\n")
