"""What the report says of encoded chunks."""

from __future__ import annotations

from gym_data.preparing.batch import EncodedBatch
from gym_data.report import DataReport, Dropped
from gym_sdk.errors import DataError


def count_batch(report: DataReport, batch: EncodedBatch, *, is_eval: bool = False) -> None:
    """Adds a chunk's rows to the report. Raises DataError when its rows are for another objective than those before."""
    report.rows_in += batch.num_rows
    report.rows_truncated += batch.num_truncated
    report.rows_without_stop += batch.num_without_stop
    if is_eval:
        report.rows_eval += batch.num_used
    else:
        report.rows_train += batch.num_used
        report.systems = list(dict.fromkeys([*report.systems, *batch.systems]))[:2]
    for counted, into in ((batch.dropped, report.dropped), (batch.left_out, report.left_out)):
        for reason, seen in counted.items():
            into.setdefault(reason, Dropped()).merge(seen.count, seen.lines)
    kinds = {*batch.objectives, *([report.objective] if report.objective else [])}
    if len(kinds) > 1:
        raise DataError(
            f"rows for different objectives: {' and '.join(sorted(kinds))}", hint="A run trains rows of one kind."
        )
    report.objective = next(iter(kinds), "")
