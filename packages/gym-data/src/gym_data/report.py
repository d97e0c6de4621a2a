"""What became of the rows: counts, reasons, token statistics, and three rows to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from gym_data.encoding.tokenizer import Tokenizer

MAX_LISTED_LINES = 100
_DERIVED = ("rows_used", "rows_dropped", "warnings")


@dataclass(slots=True)
class Dropped:
    """Rows left out for one reason. `lines` lists the first hundred as `file:line`."""

    count: int = 0
    lines: list[str] = field(default_factory=list)

    def add(self, place: str) -> None:
        """Counts one row."""
        self.merge(1, [place])

    def merge(self, count: int, places: list[str]) -> None:
        """Counts several rows."""
        self.count += count
        self.lines += places[: max(0, MAX_LISTED_LINES - len(self.lines))]


@dataclass(frozen=True, slots=True)
class SampleToken:
    """A stretch of a rendered row."""

    text: str
    trained: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """A rendered row: its place, and its text in stretches that are trained or not."""

    place: str
    tokens: tuple[SampleToken, ...]


def sample_of(ids: Any, loss_mask: Any, tokenizer: Tokenizer, place: str) -> Sample:
    """A document's text in stretches of trained and untrained tokens."""
    edges = [0, *(np.flatnonzero(np.diff(loss_mask.astype(np.int8))) + 1), len(ids)]
    stretches = [SampleToken(tokenizer.decode(ids[a:b]), bool(loss_mask[a])) for a, b in pairwise(edges) if b > a]
    return Sample(place, tuple(stretches))


@dataclass(slots=True)
class LengthStats:
    """Token lengths of rows: quantiles, and a histogram over powers of two."""

    minimum: int = 0
    median: int = 0
    p90: int = 0
    p99: int = 0
    maximum: int = 0
    histogram: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, lengths: Sequence[int] | NDArray[np.integer]) -> LengthStats:
        """The statistics of `lengths`."""
        values = np.asarray(lengths, np.int64)
        if not len(values):
            return cls()
        edges = [0, *(1 << power for power in range(4, 1 + int(values.max()).bit_length()))]
        edges = edges if edges[-1] > values.max() else [*edges, 1 << int(values.max()).bit_length()]
        counts, _ = np.histogram(values, edges)
        named = {f"{a}-{b - 1}": int(n) for a, b, n in zip(edges, edges[1:], counts, strict=False) if n}
        low, median, p90, p99, high = np.quantile(values, [0, 0.5, 0.9, 0.99, 1.0], method="nearest")
        return cls(int(low), int(median), int(p90), int(p99), int(high), named)


@dataclass(slots=True)
class DataReport:
    """The account of a preparation. Rows in = used for training + used for evaluation + dropped."""

    fingerprint: str = ""
    objective: str = ""
    """What the rows are fit for: `sft`, `preference` or `unpaired`."""
    moment: str = ""
    """The date and time that the chat template was told, where it asks: the same rows need it again."""
    systems: list[str] = field(default_factory=list)
    """The system messages of the training rows, no more than two of them; an empty one for rows without. A model whose
    rows all had the same one should be asked with it. None where `data.system` changes them."""
    streamed: bool = False
    """Whether rows are counted while they are trained on: those in the shuffle buffer are counted already."""
    rows_in: int = 0
    rows_train: int = 0
    rows_eval: int = 0
    rows_eval_split: int = 0
    """Of the evaluation rows, those that were held out of the training sources."""
    rows_truncated: int = 0
    rows_without_stop: int = 0
    """Rows with an answer after which the chat template writes no stop token."""
    labels: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, Dropped] = field(default_factory=dict)
    tokens: int = 0
    trained_tokens: int = 0
    lengths: LengthStats = field(default_factory=LengthStats)
    pack_fill: float = 0.0
    """The share of packs of `max_length` tokens that rows fill, packed best-fit."""
    left_out: dict[str, Dropped] = field(default_factory=dict)
    """Fields that the chat template did not write, such as reasoning of earlier turns."""
    samples: list[Sample] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)
    from_cache: bool = False

    @property
    def rows_used(self) -> int:
        """Rows that are trained on or evaluated."""
        return self.rows_train + self.rows_eval

    @property
    def rows_dropped(self) -> int:
        """Rows left out, for whatever reason."""
        return sum(dropped.count for dropped in self.dropped.values())

    def drop(self, reason: str, place: str) -> None:
        """Counts a row that is left out."""
        self.dropped.setdefault(reason, Dropped()).add(place)

    def to_json(self) -> bytes:
        """The report as JSON."""
        return orjson.dumps(
            {**asdict(self), **{name: getattr(self, name) for name in _DERIVED}},
            option=orjson.OPT_INDENT_2,
        )

    @classmethod
    def from_json(cls, text: bytes) -> DataReport:
        """The report that `to_json` wrote."""
        value = orjson.loads(text)
        for name in _DERIVED:
            del value[name]
        value["dropped"] = {reason: Dropped(**item) for reason, item in value["dropped"].items()}
        value["left_out"] = {name: Dropped(**item) for name, item in value["left_out"].items()}
        value["lengths"] = LengthStats(**value["lengths"])
        value["samples"] = [
            Sample(item["place"], tuple(SampleToken(**token) for token in item["tokens"])) for item in value["samples"]
        ]
        return cls(**value)

    def summary(self) -> str:
        """The counts in a few lines."""
        lines = ["rows are read while training; so far"] if self.streamed else []
        lines += [
            f"{self.rows_in} rows in: {self.rows_train} train, {self.rows_eval} eval, {self.rows_dropped} dropped; "
            f"{self.tokens} tokens, {self.trained_tokens} trained"
        ]
        lines += [f"  dropped {d.count}: {reason} ({', '.join(d.lines[:5])})" for reason, d in self.dropped.items()]
        if self.rows_truncated:
            lines.append(f"  truncated {self.rows_truncated}")
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)

    @property
    def warnings(self) -> list[str]:
        """What a person should know before training on these rows."""
        found = [
            f"the chat template writes no {name} in {seen.count} rows ({', '.join(seen.lines[:5])})"
            for name, seen in self.left_out.items()
        ]
        if self.rows_without_stop:
            found.append(
                f"the chat template writes no stop token after an answer of {self.rows_without_stop} rows: "
                "from these the model does not learn to stop"
            )
        return found

    def card(self) -> str:
        """The data card: what went in, what came of it, and the digests by which both are known again."""
        lines = ["# Data card", "", self.summary(), "", f"Fingerprint of the prepared data: `{self.fingerprint}`"]
        if self.moment:
            lines.append(f"The chat template was told that it is {self.moment}.")
        lines += ["", "| source | format | rows | weight | sha256 |", "| --- | --- | --- | --- | --- |"]
        for source in self.sources:
            shown = [source.get(name, "") for name in ("source", "format", "rows", "weight")]
            lines.append(f"| {' | '.join(map(str, shown))} | `{source.get('sha256', '')}` |")
        length = self.lengths
        lines += [
            "",
            f"Tokens of a row: median {length.median}, 90 % {length.p90}, 99 % {length.p99}, longest {length.maximum}; "
            f"packs are {self.pack_fill:.1%} full.",
            "",
            "| tokens | rows |",
            "| --- | --- |",
            *(f"| {span} | {count} |" for span, count in length.histogram.items()),
        ]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Writes `report.json` into the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_bytes(self.to_json())
