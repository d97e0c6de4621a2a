"""`gym data inspect`, `validate`, `stats` and `preview`: looking at rows without changing them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter

from gym_data.cli.options import (
    AsJson,
    Force,
    MaxLength,
    Model,
    ReadingOptions,
    Rows,
    counted,
    sources_of,
    tokenizer_of,
)
from gym_data.packing import micro_batches
from gym_data.preparing.documents import EncodedRow, RowEncoder
from gym_data.preview.html import page
from gym_data.preview.terminal import coloured
from gym_data.quality.rows import every_message, place_of, read_all, row_of, writing
from gym_data.quality.validate import Problem, checked
from gym_data.record import Record
from gym_data.report import LengthStats, Sample, sample_of
from gym_sdk.cli import console
from gym_sdk.errors import DataError
from gym_sdk.spec.data import DataSpec

MAX_SHOWN = 20
BATCH_ROWS = 256


def inspect(*sources: Rows, as_json: AsJson = False, reading: ReadingOptions = None) -> int:
    """Say what is in files: formats, rows, roles, and the first row."""
    formats: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    roles: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    first: Record | None = None
    with counted(read_all(sources_of(sources, reading)), "reading") as records:
        for record in records:
            first = first or record
            formats[record.source.format if record.source else "?"] += 1
            kinds[record.kind] += 1
            for message in every_message(record):
                roles[message.role] += 1
                parts.update(part.type for part in message.parts)
    assert first is not None
    data: dict[str, Any] = {
        "rows": sum(formats.values()),
        "formats": dict(formats),
        "kinds": dict(kinds),
        "messages": dict(roles),
        "parts": dict(parts),
        "first_row": row_of(first),
    }
    if as_json:
        console.out_json(data)
        return 0
    console.out(f"{data['rows']} rows")
    for name in ("formats", "kinds", "messages", "parts"):
        console.out(f"{name:<9} " + ", ".join(f"{key} {count}" for key, count in data[name].items()))
    console.out(f"first row, {place_of(first)}:")
    for message in every_message(first):
        said = "".join(part.text or f"<{part.type}>" for part in message.parts)
        console.out(f"  {message.role}: {said[:300]}{'...' if len(said) > 300 else ''}")
    return 0


def validate(
    *sources: Rows,
    model: Annotated[str | None, Parameter(help="Also render each row with this model's chat template.")] = None,
    as_json: AsJson = False,
    reading: ReadingOptions = None,
) -> int:
    """List every row that cannot be used; exit code 2 when there is one."""
    problems: list[DataError] = []
    rows = 0
    named = sources_of(sources, reading)
    encoder = RowEncoder(tokenizer_of(model), DataSpec(train=named)) if model else None
    with console.progress(None, "rows", "checking") as progress:
        for source in named:
            for found in checked(source):
                rows += 1
                progress.advance()
                error = found.error if isinstance(found, Problem) else _rendering_error(found, encoder)
                if error is not None:
                    problems.append(error)
    if as_json:
        listed = [{"place": str(e.where or ""), "message": e.message, "hint": e.hint} for e in problems]
        console.out_json({"rows_in": rows, "valid": rows - len(problems), "problems": listed})
    else:
        for error in problems[:MAX_SHOWN]:
            console.out(str(error))
        if len(problems) > MAX_SHOWN:
            console.out(f"... and {len(problems) - MAX_SHOWN} more (--json lists all)")
        console.out(f"{rows} rows in, {rows - len(problems)} valid, {len(problems)} not")
    return 2 if problems else 0


def _rendering_error(record: Record, encoder: RowEncoder | None) -> DataError | None:
    if encoder is None:
        return None
    try:
        encoder.encode([record])
    except DataError as error:
        return error
    return None


def stats(
    *sources: Rows, model: Model, max_length: MaxLength = 2048, as_json: AsJson = False, reading: ReadingOptions = None
) -> int:
    """Count tokens, and how well rows fill packs."""
    rows, lengths, trained, dropped = 0, [], 0, Counter[str]()
    for row in _encoded_rows(sources, model, max_length, reading):
        rows += 1
        if row.dropped and not row.groups:
            dropped[row.dropped] += 1
        for group in row.groups:
            lengths.append(sum(len(document.ids) for document in group))
            trained += sum(int(document.loss_mask.sum()) for document in group)
    total = sum(lengths)
    packs = micro_batches(np.arange(len(lengths)), lengths, max_length) if lengths else []
    data: dict[str, Any] = {
        "rows_in": rows,
        "kept": rows - sum(dropped.values()),
        "dropped": dict(dropped),
        "tokens": total,
        "trained_tokens": trained,
        "lengths_tokens": asdict(LengthStats.of(lengths)),
        "packs": len(packs),
        "pack_fill": round(total / (len(packs) * max_length), 4) if packs else 0.0,
    }
    if as_json:
        console.out_json(data)
        return 0
    stats_of = LengthStats.of(lengths)
    console.out(f"{rows} rows in, {data['kept']} kept, {sum(dropped.values())} dropped")
    for reason, count in dropped.items():
        console.out(f"  {count} dropped: {reason}")
    share = f" ({trained / total:.0%})" if total else ""
    console.out(f"{total} tokens, {trained} trained{share}")
    console.out(
        f"length in tokens: shortest {stats_of.minimum}, median {stats_of.median}, 90% {stats_of.p90}, "
        f"99% {stats_of.p99}, longest {stats_of.maximum}"
    )
    widest = max(stats_of.histogram.values(), default=1)
    for span, count in stats_of.histogram.items():
        console.out(f"  {span:>13} {count:>8} {'#' * max(1, round(40 * count / widest))}")
    console.out(f"{len(packs)} packs of {max_length} tokens, {data['pack_fill']:.1%} full")
    return 0


def preview(
    *sources: Rows,
    model: Model,
    rows: Annotated[int, Parameter(help="How many rows are shown.")] = 3,
    html: Annotated[Path | None, Parameter(help="Write a page that needs no other file.")] = None,
    max_length: MaxLength = 2048,
    force: Force = False,
    as_json: AsJson = False,
    reading: ReadingOptions = None,
) -> int:
    """Show rows as the model sees them, with the trained tokens marked."""
    samples: list[Sample] = []
    tokenizer = tokenizer_of(model)
    for row in islice(_encoded_rows(sources, model, max_length, reading, batch_rows=max(1, rows)), rows):
        place = f"{row.source.uri}:{row.source.row}" if row.source else "?"
        if not row.groups:
            console.warn(f"{place}: dropped: {row.dropped}")
        for group in row.groups:
            for document in group:
                named = place if document.role == 0 else f"{place} ({document.role.name.lower()})"
                samples.append(sample_of(document.ids, document.loss_mask, tokenizer, named))
    if html is not None:
        with writing(html, force=force) as file:
            file.write(page(samples, title=f"{', '.join(sources)} as {model} sees it").encode("utf-8"))
        console.err(f"wrote {html}")
    if as_json:
        console.out_json([asdict(sample) for sample in samples])
    elif html is None:
        for sample in samples:
            console.out(coloured(sample))
    return 0


def _encoded_rows(
    sources: tuple[str, ...], model: str, max_length: int, reading: ReadingOptions, batch_rows: int = BATCH_ROWS
) -> Iterator[EncodedRow]:
    """The rows as training would have them."""
    named = sources_of(sources, reading)
    encoder = RowEncoder(tokenizer_of(model), DataSpec(train=named, max_length=max_length))
    with counted(read_all(named), "encoding") as records:
        while batch := list(islice(records, batch_rows)):
            yield from encoder.encode(batch)
