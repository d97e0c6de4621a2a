"""Jobs in SQLite. Functions over a connection: the caller decides what is one transaction.

Invariant: a job's state never changes without its event in the same transaction, and events are numbered without
gaps, so state and history cannot disagree after a crash.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import time
from collections.abc import Iterable, Sequence
from typing import Any

from gym_sdk._proto.gym.v1.events_pb2 import RunEvent
from gym_serve.errors import Reason, not_found
from gym_serve.jobs.model import FINAL, Artifact, Attempt, Checkpoint, Failure, Job, JobEvent, JobState
from gym_serve.jobs.progress import advance, num_tokens


def insert(connection: sqlite3.Connection, job: Job, request_id: str | None, file_ids: Iterable[str]) -> Job:
    """Stores a new job in the queue, with its first event."""
    connection.execute(
        """INSERT INTO jobs (id, owner, request_id, name, spec_json, spec_sha256, labels_json, origin_json, num_gpus,
               max_attempts, state, message, progress, created_at, queued_at, attempt, not_before, run_cursor,
               last_sequence, artifacts_json)
           VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, '', x'', ?, ?, 0, ?, 0, 0, '[]')""",
        (
            job.id,
            job.owner,
            request_id,
            job.name,
            job.spec_json,
            job.spec_sha256,
            json.dumps(job.labels, ensure_ascii=False),
            json.dumps(job.origin, ensure_ascii=False),
            job.num_gpus,
            job.max_attempts,
            job.state.value,
            job.created_at,
            job.queued_at,
            job.not_before,
        ),
    )
    connection.executemany("INSERT INTO job_files VALUES (?, ?)", [(job.id, file_id) for file_id in set(file_ids)])
    _append(connection, job.id, [(job.created_at, job.state.value, "", None)])
    return get(connection, job.id)


def get(connection: sqlite3.Connection, job_id: str) -> Job:
    """A job by its id; a `ServiceError` when there is none."""
    row = connection.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if row is None:
        raise not_found(Reason.JOB_NOT_FOUND, job_id)
    return _job_of(row)


def by_request(connection: sqlite3.Connection, owner: str, request_id: str) -> Job | None:
    """The job that an owner made with this request id."""
    row = connection.execute("SELECT * FROM jobs WHERE owner = ? AND request_id = ?", (owner, request_id)).fetchone()
    return _job_of(row) if row else None


def page(
    connection: sqlite3.Connection,
    *,
    owner: str | None,
    states: Sequence[JobState] = (),
    labels: dict[str, str] | None = None,
    after: str | None = None,
    limit: int,
) -> list[Job]:
    """Jobs from the newest to the oldest, beginning below the job `after`. `owner=None` is everyone."""
    where, values = ["1"], []
    if owner is not None:
        where.append("owner = ?")
        values.append(owner)
    if states:
        where.append(f"state IN ({', '.join('?' * len(states))})")
        values.extend(state.value for state in states)
    for label, value in (labels or {}).items():
        where.append("EXISTS (SELECT 1 FROM json_each(labels_json) WHERE key = ? AND value = ?)")
        values.extend((label, value))
    if after is not None:
        last = get(connection, after)
        where.append("(created_at, id) < (?, ?)")
        values.extend((last.created_at, last.id))
    rows = connection.execute(
        f"SELECT * FROM jobs WHERE {' AND '.join(where)} ORDER BY created_at DESC, id DESC LIMIT ?", (*values, limit)
    )
    return [_job_of(row) for row in rows]


def queue_position(connection: sqlite3.Connection, job: Job) -> int:
    """How many jobs have waited for longer."""
    return connection.execute(
        "SELECT count(*) FROM jobs WHERE state = 'queued' AND (queued_at, id) < (?, ?)", (job.queued_at, job.id)
    ).fetchone()[0]


def in_states(connection: sqlite3.Connection, states: Iterable[JobState]) -> list[Job]:
    """All jobs in these states, oldest first."""
    names = [state.value for state in states]
    rows = connection.execute(
        f"SELECT * FROM jobs WHERE state IN ({', '.join('?' * len(names))}) ORDER BY created_at, id", names
    )
    return [_job_of(row) for row in rows]


def count_queued(connection: sqlite3.Connection, owner: str) -> int:
    """How many jobs of an owner wait."""
    return connection.execute("SELECT count(*) FROM jobs WHERE owner = ? AND state = 'queued'", (owner,)).fetchone()[0]


def move(
    connection: sqlite3.Connection,
    job_id: str,
    to: JobState,
    *,
    message: str = "",
    failure: Failure | None = None,
    model_id: str | None = None,
    not_before: float | None = None,
) -> Job:
    """Puts a job into another state and writes the event of it."""
    now = time.time()
    connection.execute(
        """UPDATE jobs SET state = ?, message = ?, failure_json = ?,
               model_id = coalesce(?, model_id),
               not_before = coalesce(?, not_before),
               queued_at = CASE WHEN ? = 'queued' THEN ? ELSE queued_at END,
               started_at = CASE WHEN ? = 'starting' THEN coalesce(started_at, ?) ELSE started_at END,
               finished_at = ?
           WHERE id = ?""",
        (
            to.value,
            message,
            json.dumps(dataclasses.asdict(failure), ensure_ascii=False) if failure else None,
            model_id,
            not_before,
            to.value,
            now,
            to.value,
            now,
            now if to in FINAL else None,
            job_id,
        ),
    )
    _append(connection, job_id, [(now, to.value, message, None)])
    return get(connection, job_id)


def begin_attempt(
    connection: sqlite3.Connection, job_id: str, directory: str, gpus: list[int], process: dict[str, object]
) -> Job:
    """Writes down a started process and puts the job into `starting`."""
    number = get(connection, job_id).attempt + 1
    connection.execute("UPDATE jobs SET attempt = ? WHERE id = ?", (number, job_id))
    connection.execute(
        """INSERT INTO attempts (job_id, number, directory, gpus_json, process_json, started_at)
           VALUES (?, ?, ?, ?, ?, ?)""",
        (job_id, number, directory, json.dumps(gpus), json.dumps(process), time.time()),
    )
    return move(connection, job_id, JobState.STARTING, message="" if number == 1 else f"attempt {number}")


def end_attempt(connection: sqlite3.Connection, job_id: str, outcome: str) -> None:
    """Writes down how the present attempt ended."""
    connection.execute(
        "UPDATE attempts SET ended_at = ?, outcome = ? WHERE job_id = ? AND ended_at IS NULL",
        (time.time(), outcome, job_id),
    )


def attempts(connection: sqlite3.Connection, job_id: str) -> list[Attempt]:
    """The attempts of a job, first to last."""
    rows = connection.execute("SELECT * FROM attempts WHERE job_id = ? ORDER BY number", (job_id,))
    return [_attempt_of(row) for row in rows]


def open_attempts(connection: sqlite3.Connection) -> list[Attempt]:
    """The attempts of all jobs whose end is not written down."""
    return [_attempt_of(row) for row in connection.execute("SELECT * FROM attempts WHERE ended_at IS NULL")]


def set_run_dir(connection: sqlite3.Connection, job_id: str, run_dir: str) -> None:
    """Writes down a job's run directory; its event log is read from the start."""
    connection.execute("UPDATE jobs SET run_dir = ?, run_cursor = 0 WHERE id = ?", (run_dir, job_id))


def append_run_events(connection: sqlite3.Connection, job_id: str, events: Sequence[RunEvent]) -> int:
    """Takes over events of the run; those taken before are passed over.

    Cursor, progress and events change in one transaction, so none is lost or doubled whenever the daemon dies.
    """
    job = get(connection, job_id)
    new = [event for event in events if event.sequence > job.run_cursor]
    if not new:
        return 0
    if job.state is JobState.STARTING:
        move(connection, job_id, JobState.RUNNING)
    _append(
        connection,
        job_id,
        [(seconds_of(event), None, None, event.SerializeToString()) for event in new],
    )
    progress = job.progress
    for event in new:
        progress = advance(progress, [event])
        if event.HasField("checkpoint"):
            connection.execute(
                "INSERT OR REPLACE INTO job_checkpoints VALUES (?, ?, ?, ?, ?)",
                (job_id, event.checkpoint.step, event.checkpoint.path, seconds_of(event), progress),
            )
    connection.execute(
        "UPDATE jobs SET run_cursor = ?, progress = ?, num_tokens = num_tokens + ? WHERE id = ?",
        (new[-1].sequence, progress, sum(num_tokens(event) for event in new), job_id),
    )
    return len(new)


def seconds_of(event: RunEvent) -> float:
    """An event's time."""
    return event.time.seconds + event.time.nanos / 1e9


def checkpoints(connection: sqlite3.Connection, job_id: str) -> list[Checkpoint]:
    """The checkpoints that a job's run has written, the latest first; not all of them are still on disk."""
    rows = connection.execute("SELECT * FROM job_checkpoints WHERE job_id = ? ORDER BY step DESC", (job_id,))
    return [Checkpoint(**row) for row in rows]


def set_artifacts(connection: sqlite3.Connection, job_id: str, artifacts: Sequence[Artifact]) -> None:
    """Writes down the files that a job made."""
    text = json.dumps([dataclasses.asdict(artifact) for artifact in artifacts], ensure_ascii=False)
    connection.execute("UPDATE jobs SET artifacts_json = ? WHERE id = ?", (text, job_id))


def events(connection: sqlite3.Connection, job_id: str, *, after: int, limit: int) -> list[JobEvent]:
    """The events with a sequence number above `after`, at most `limit`."""
    rows = connection.execute(
        "SELECT * FROM job_events WHERE job_id = ? AND sequence > ? ORDER BY sequence LIMIT ?", (job_id, after, limit)
    )
    return [_event_of(row) for row in rows]


def latest_events(connection: sqlite3.Connection, job_id: str, *, before: int | None, limit: int) -> list[JobEvent]:
    """The events with a sequence number below `before`, the newest first."""
    rows = connection.execute(
        "SELECT * FROM job_events WHERE job_id = ? AND sequence < ? ORDER BY sequence DESC LIMIT ?",
        (job_id, before if before is not None else 2**62, limit),
    )
    return [_event_of(row) for row in rows]


def delete(connection: sqlite3.Connection, job_id: str) -> None:
    """Removes a job with its attempts and events."""
    connection.execute("DELETE FROM jobs WHERE id = ?", (job_id,))


def _append(
    connection: sqlite3.Connection, job_id: str, new: Sequence[tuple[float, str | None, str | None, bytes | None]]
) -> None:
    row = connection.execute("SELECT last_sequence, attempt FROM jobs WHERE id = ?", (job_id,)).fetchone()
    connection.executemany(
        "INSERT INTO job_events (job_id, sequence, time, attempt, state, message, run) VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (job_id, row["last_sequence"] + number, at, row["attempt"], *rest)
            for number, (at, *rest) in enumerate(new, 1)
        ],
    )
    connection.execute("UPDATE jobs SET last_sequence = ? WHERE id = ?", (row["last_sequence"] + len(new), job_id))


def _job_of(row: sqlite3.Row) -> Job:
    return Job(
        id=row["id"],
        owner=row["owner"],
        name=row["name"],
        spec_json=row["spec_json"],
        spec_sha256=row["spec_sha256"],
        labels=json.loads(row["labels_json"]),
        origin=json.loads(row["origin_json"]),
        num_gpus=row["num_gpus"],
        max_attempts=row["max_attempts"],
        state=JobState(row["state"]),
        message=row["message"],
        failure=_failure_of(row["failure_json"]),
        progress=row["progress"],
        num_tokens=row["num_tokens"],
        created_at=row["created_at"],
        queued_at=row["queued_at"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        attempt=row["attempt"],
        not_before=row["not_before"],
        run_dir=row["run_dir"],
        run_cursor=row["run_cursor"],
        last_sequence=row["last_sequence"],
        model_id=row["model_id"],
        artifacts=tuple(Artifact(**values) for values in json.loads(row["artifacts_json"])),
    )


def _event_of(row: sqlite3.Row) -> JobEvent:
    return JobEvent(
        sequence=row["sequence"],
        time=row["time"],
        attempt=row["attempt"],
        state=JobState(row["state"]) if row["state"] else None,
        message=row["message"] or "",
        run=row["run"],
    )


def _failure_of(text: str | None) -> Failure | None:
    if text is None:
        return None
    values: dict[str, Any] = json.loads(text)
    values["log_lines"] = tuple(values["log_lines"])
    return Failure(**values)


def _attempt_of(row: sqlite3.Row) -> Attempt:
    return Attempt(
        job_id=row["job_id"],
        number=row["number"],
        directory=row["directory"],
        gpus=json.loads(row["gpus_json"]),
        process=json.loads(row["process_json"]),
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        outcome=row["outcome"],
    )
