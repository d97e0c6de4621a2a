"""`gym data convert`, `split`, `dedup`, `decontaminate` and `pii`: rows in, rows out, and an account of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gym_data.cli.options import AsJson, Force, Out, Reading, ReadingOptions, Rows, counted, sources_of
from gym_data.formats import RowError, format_named
from gym_data.quality.convert import converted
from gym_data.quality.decontaminate import NGRAM_WORDS, Contamination
from gym_data.quality.dedup import Seen
from gym_data.quality.pii import masked_record
from gym_data.quality.rows import Account, content_key, place_of, read_all, row_of, write_row, writing
from gym_data.quality.split import is_held_out
from gym_data.record import Record
from gym_sdk.cli import console
from gym_sdk.errors import UserError
from gym_sdk.spec.data import DataSource

Decision = Callable[[Record], tuple[dict[str, Any] | None, str | None, bool]]
"""`(row to write, reason to drop, whether it was changed)`."""


def convert(
    *sources: Rows,
    to: Annotated[str, Parameter(help="The format to write, such as openai.")],
    out: Out,
    skip: Annotated[bool, Parameter(negative="", help="Drop rows that the format cannot hold.")] = False,
    force: Force = False,
    as_json: AsJson = False,
    reading: ReadingOptions = None,
) -> int:
    """Write rows in another format. A row that would lose something is an error, or dropped and counted with --skip."""
    format_named(to)

    def decide(record: Record) -> tuple[dict[str, Any] | None, str | None, bool]:
        try:
            return converted(record, to), None, record.source is None or record.source.format != to
        except RowError as error:
            if not skip and record.source:
                raise error.located(record.source) from None
            return None, error.message, False

    return _rewrite(sources_of(sources, reading), decide, out, force, as_json)


def split(
    *sources: Rows,
    out: Out,
    held_out: Annotated[Path, Parameter(help="The file of the held-out share; --out has the rest.")],
    share: Annotated[float, Parameter(help="How much is held out, on average.")] = 0.1,
    seed: Annotated[int, Parameter(help="Another seed holds out other rows.")] = 0,
    force: Force = False,
    as_json: AsJson = False,
    reading: ReadingOptions = None,
) -> int:
    """Divide rows by content into two files. Equal rows stand on one side, and stay there when rows are added."""
    if not 0 < share < 1:
        raise UserError(f"--share {share}: must be between 0 and 1")
    account = Account()
    num_held = 0
    with (
        writing(out, force=force) as main,
        writing(held_out, force=force) as other,
        counted(read_all(sources_of(sources, reading)), "splitting") as records,
    ):
        for record in records:
            is_held = is_held_out(content_key(record), share, seed)
            write_row(other if is_held else main, row_of(record))
            num_held += is_held
            account.keep()
    lines = [f"  {account.kept - num_held} to {out}, {num_held} to {held_out}"]
    return _finish(account, as_json, {"held_out": num_held}, lines)


def dedup(
    *sources: Rows,
    out: Out,
    near: Annotated[
        float | None,
        Parameter(
            help="Also drop rows whose five-word sequences are shared to this degree (0.8 is usual), found by MinHash."
        ),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
    reading: ReadingOptions = None,
) -> int:
    """Drop rows that say the same as an earlier one."""
    if near is not None and not 0 < near <= 1:
        raise UserError(f"--near {near}: must be above 0 and at most 1")
    seen = Seen(near)

    def decide(record: Record) -> tuple[dict[str, Any] | None, str | None, bool]:
        earlier = seen.earlier(record, place_of(record))
        return (None, f"{earlier[0]} to an earlier row", False) if earlier else (row_of(record), None, False)

    return _rewrite(sources_of(sources, reading), decide, out, force, as_json)


def decontaminate(
    *sources: Rows,
    against: Annotated[list[str], Parameter(negative="", help="The evaluation set; may be given several times.")],
    out: Out,
    words: Annotated[int, Parameter(help="How many words in a row must be the same.")] = NGRAM_WORDS,
    force: Force = False,
    as_json: AsJson = False,
    reading: ReadingOptions = None,
) -> int:
    """Drop rows that hold a piece of an evaluation set."""
    if words < 1:
        raise UserError(f"--words {words}: must be at least 1")
    contamination = Contamination(read_all(sources_of(against, Reading())), words)

    def decide(record: Record) -> tuple[dict[str, Any] | None, str | None, bool]:
        found = contamination.found_in(record)
        return (None, f"holds a piece of {found.rpartition(':')[0]}", False) if found else (row_of(record), None, False)

    return _rewrite(sources_of(sources, reading), decide, out, force, as_json)


def pii(
    *sources: Rows,
    out: Annotated[
        Path | None,
        Parameter(name=("--out", "-o"), help="The file to write, with [EMAIL] and the like for what was found."),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
    reading: ReadingOptions = None,
) -> int:
    """Count personal data that has a form (mail, telephone, card, IBAN, IP); with --out, write the rows masked."""
    found: Counter[str] = Counter()

    def decide(record: Record) -> tuple[dict[str, Any] | None, str | None, bool]:
        before = found.total()
        masked = masked_record(record, found)
        return row_of(masked), None, found.total() > before

    named = sources_of(sources, reading)
    if out is not None:
        account = _written(named, decide, out, force)
    else:
        account = Account()
        with counted(read_all(named), "reading") as records:
            for record in records:
                account.keep(changed=decide(record)[2])
    listed = [f"  {kind} {count}" for kind, count in sorted(found.items())] or ["  nothing found"]
    return _finish(account, as_json, {"found": dict(found)}, listed)


def _rewrite(sources: Sequence[DataSource], decide: Decision, out: Path, force: bool, as_json: bool) -> int:
    return _finish(_written(sources, decide, out, force), as_json, {}, [])


def _written(sources: Sequence[DataSource], decide: Decision, out: Path, force: bool) -> Account:
    account = Account()
    with writing(out, force=force) as file, counted(read_all(list(sources)), "writing") as records:
        for record in records:
            row, reason, changed = decide(record)
            if row is None:
                account.drop(reason or "", record)
            else:
                write_row(file, row)
                account.keep(changed=changed)
    return account


def _finish(account: Account, as_json: bool, more: dict[str, Any], lines: list[str]) -> int:
    if as_json:
        console.out_json({**account.to_data(), **more})
    else:
        for line in (*account.lines(), *lines):
            console.out(line)
    return 0
