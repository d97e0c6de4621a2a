"""What the commands of `gym data` take in common, declared once: rows, how to read them, where to write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gym_data.encoding.tokenizer import Tokenizer
from gym_data.record import Record
from gym_sdk.cli import console
from gym_sdk.errors import UserError
from gym_sdk.spec.data import DataSource

Rows = Annotated[str, Parameter(help="Files, globs, folders, hub:owner/name, dataset_info.json#name or URLs.")]
Model = Annotated[str, Parameter(help="The model folder whose tokenizer and chat template are used.")]
MaxLength = Annotated[int, Parameter(help="The most tokens of a row; longer ones are cut as in training.")]
Out = Annotated[Path, Parameter(name=("--out", "-o"), help="The JSON Lines file to write.")]
Force = Annotated[bool, Parameter(negative="", help="Overwrite what is there.")]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON.")]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the rows are read."""

    format: str = "auto"
    """The shape of the rows; recognised when left out."""

    column: Annotated[list[str] | None, Parameter(negative="")] = None
    """A column by the format's name, such as prompt=question; may be given several times."""

    limit: int | None = None
    """Only the first rows."""

    encoding: str = "utf-8"
    """How the text of csv, tsv, txt and md files is stored, such as cp1252."""

    split: str = "train"
    """The split of a data set of the hub, or of one that datasets saved."""


ReadingOptions = Annotated[Reading | None, Parameter(name="*", group="Reading")]


def sources_of(names: Sequence[str], reading: Reading | None) -> list[DataSource]:
    """The sources of a command line. Raises UserError for a column that is no pair."""
    chosen = reading or Reading()
    columns = {}
    for text in chosen.column or []:
        key, sign, value = text.partition("=")
        if not (key and sign and value):
            raise UserError(f"--column {text}: must be a pair such as prompt=question")
        columns[key] = value
    if not names:
        raise UserError("no data named", hint="gym data inspect data/train.jsonl")
    if chosen.limit is not None and chosen.limit < 1:
        raise UserError(f"--limit {chosen.limit}: must be at least 1")
    return [
        DataSource(
            source=name,
            format=chosen.format,
            columns=columns,
            limit=chosen.limit,
            encoding=chosen.encoding,
            split=chosen.split,
        )
        for name in names
    ]


def model_folder(model: str) -> Path:
    """The folder of a model. Raises UserError when there is none."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise UserError(f"--model {model}: no such folder", hint="Name a model folder with a tokenizer.json.")
    return folder


def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer of a model folder."""
    return Tokenizer.from_folder(model_folder(model))


@contextmanager
def counted(records: Iterator[Record], label: str) -> Iterator[Iterator[Record]]:
    """The records, with progress on standard error."""
    with console.progress(None, "rows", label) as progress:

        def going() -> Iterator[Record]:
            for record in records:
                yield record
                progress.advance()

        yield going()
