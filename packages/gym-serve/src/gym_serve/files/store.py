"""Files and uploads in SQLite. Functions over a connection: the caller decides what is one transaction."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Literal

from gym_serve.errors import Reason, not_found

UploadState = Literal["pending", "completed", "cancelled", "expired"]


@dataclass(frozen=True, kw_only=True)
class File:
    """A complete file. Times are seconds since 1970."""

    id: str
    owner: str
    filename: str
    purpose: str
    sha256: str
    size_bytes: int
    created_at: float
    expires_at: float | None = None
    format: str | None = None
    """What gym-data found it to be; None for files that are no training data."""
    num_rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A file that is arriving."""

    id: str
    owner: str
    request_id: str | None
    filename: str
    purpose: str
    size_bytes: int
    sha256: str | None
    created_at: float
    touched_at: float
    expires_after_s: float | None
    state: UploadState
    file_id: str | None = None


def insert_file(connection: sqlite3.Connection, file: File) -> None:
    """Stores a file."""
    connection.execute(
        """INSERT INTO files (id, owner, filename, purpose, sha256, size_bytes, created_at, expires_at, format,
               num_rows)
           VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
        (
            file.id,
            file.owner,
            file.filename,
            file.purpose,
            file.sha256,
            file.size_bytes,
            file.created_at,
            file.expires_at,
            file.format,
            file.num_rows,
        ),
    )


def get_file(connection: sqlite3.Connection, file_id: str) -> File:
    """A file by its id; a `ServiceError` when there is none."""
    row = connection.execute("SELECT * FROM files WHERE id = ?", (file_id,)).fetchone()
    if row is None:
        raise not_found(Reason.FILE_NOT_FOUND, file_id)
    return _file_of(row)


def find_file(connection: sqlite3.Connection, file_id: str) -> File | None:
    """A file by its id, or None."""
    row = connection.execute("SELECT * FROM files WHERE id = ?", (file_id,)).fetchone()
    return _file_of(row) if row else None


def file_with_content(connection: sqlite3.Connection, owner: str, sha256: str, purpose: str) -> File | None:
    """A file of an owner with this content and purpose."""
    row = connection.execute(
        "SELECT * FROM files WHERE owner = ? AND sha256 = ? AND purpose = ? ORDER BY created_at DESC LIMIT 1",
        (owner, sha256, purpose),
    ).fetchone()
    return _file_of(row) if row else None


def page_of_files(
    connection: sqlite3.Connection,
    *,
    owner: str | None,
    purpose: str | None,
    after: str | None,
    limit: int,
    ascending: bool = False,
) -> list[File]:
    """Files by time of creation, newest first unless `ascending`, beginning behind the file `after`."""
    where, values = ["1"], []
    if owner is not None:
        where.append("owner = ?")
        values.append(owner)
    if purpose is not None:
        where.append("purpose = ?")
        values.append(purpose)
    if after is not None:
        last = get_file(connection, after)
        where.append(f"(created_at, id) {'>' if ascending else '<'} (?, ?)")
        values.extend((last.created_at, last.id))
    order = "ASC" if ascending else "DESC"
    rows = connection.execute(
        f"SELECT * FROM files WHERE {' AND '.join(where)} ORDER BY created_at {order}, id {order} LIMIT ?",
        (*values, limit),
    )
    return [_file_of(row) for row in rows]


def delete_file(connection: sqlite3.Connection, file_id: str) -> None:
    """Removes a file's row; its content goes with the next collection when nothing else has it."""
    connection.execute("DELETE FROM files WHERE id = ?", (file_id,))


def stored_bytes(connection: sqlite3.Connection, owner: str) -> int:
    """What an owner's files and pending uploads take."""
    return connection.execute(
        """SELECT (SELECT coalesce(sum(size_bytes), 0) FROM files WHERE owner = ?1)
                + (SELECT coalesce(sum(size_bytes), 0) FROM uploads WHERE owner = ?1 AND state = 'pending')""",
        (owner,),
    ).fetchone()[0]


def insert_upload(connection: sqlite3.Connection, upload: Upload) -> None:
    """Stores a new upload."""
    connection.execute(
        """INSERT INTO uploads (id, owner, request_id, filename, purpose, size_bytes, sha256, created_at, touched_at,
               expires_after_s, state)
           VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
        (
            upload.id,
            upload.owner,
            upload.request_id,
            upload.filename,
            upload.purpose,
            upload.size_bytes,
            upload.sha256,
            upload.created_at,
            upload.touched_at,
            upload.expires_after_s,
            upload.state,
        ),
    )


def get_upload(connection: sqlite3.Connection, upload_id: str) -> Upload:
    """An upload by its id; a `ServiceError` when there is none."""
    row = connection.execute("SELECT * FROM uploads WHERE id = ?", (upload_id,)).fetchone()
    if row is None:
        raise not_found(Reason.UPLOAD_NOT_FOUND, upload_id)
    return _upload_of(row)


def upload_by_request(connection: sqlite3.Connection, owner: str, request_id: str) -> Upload | None:
    """The upload that an owner began with this request id."""
    row = connection.execute("SELECT * FROM uploads WHERE owner = ? AND request_id = ?", (owner, request_id)).fetchone()
    return _upload_of(row) if row else None


def touch_upload(connection: sqlite3.Connection, upload_id: str, now: float) -> None:
    """Something arrived."""
    connection.execute("UPDATE uploads SET touched_at = ? WHERE id = ?", (now, upload_id))


def set_upload_state(
    connection: sqlite3.Connection, upload_id: str, state: UploadState, file_id: str | None = None
) -> None:
    """Ends an upload."""
    connection.execute("UPDATE uploads SET state = ?, file_id = ? WHERE id = ?", (state, file_id, upload_id))


def idle_uploads(connection: sqlite3.Connection, before: float) -> list[Upload]:
    """Pending uploads to which nothing was added since."""
    rows = connection.execute("SELECT * FROM uploads WHERE state = 'pending' AND touched_at < ?", (before,))
    return [_upload_of(row) for row in rows]


def insert_part(connection: sqlite3.Connection, part_id: str, upload_id: str, size_bytes: int, now: float) -> None:
    """Stores a part of an upload whose order is said at its completion."""
    connection.execute("INSERT INTO upload_parts VALUES (?, ?, ?, ?)", (part_id, upload_id, size_bytes, now))


def parts(connection: sqlite3.Connection, upload_id: str) -> dict[str, int]:
    """The parts of an upload and their sizes."""
    rows = connection.execute("SELECT id, size_bytes FROM upload_parts WHERE upload_id = ?", (upload_id,))
    return {row["id"]: row["size_bytes"] for row in rows}


def delete_expired_files(connection: sqlite3.Connection, now: float) -> int:
    """Removes files whose time is over."""
    return connection.execute("DELETE FROM files WHERE expires_at < ?", (now,)).rowcount


def used_content(connection: sqlite3.Connection) -> set[str]:
    """The digests that something names."""
    return {row[0] for row in connection.execute("SELECT sha256 FROM files")}


def pending_names(connection: sqlite3.Connection) -> set[str]:
    """The names below `incoming` that pending uploads use."""
    names = {row[0] for row in connection.execute("SELECT id FROM uploads WHERE state = 'pending'")}
    rows = connection.execute(
        "SELECT upload_parts.id FROM upload_parts JOIN uploads ON uploads.id = upload_id WHERE state = 'pending'"
    )
    return names | {row[0] for row in rows}


def _file_of(row: sqlite3.Row) -> File:
    return File(
        id=row["id"],
        owner=row["owner"],
        filename=row["filename"],
        purpose=row["purpose"],
        sha256=row["sha256"],
        size_bytes=row["size_bytes"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        format=row["format"],
        num_rows=row["num_rows"],
    )


def _upload_of(row: sqlite3.Row) -> Upload:
    return Upload(
        id=row["id"],
        owner=row["owner"],
        request_id=row["request_id"],
        filename=row["filename"],
        purpose=row["purpose"],
        size_bytes=row["size_bytes"],
        sha256=row["sha256"],
        created_at=row["created_at"],
        touched_at=row["touched_at"],
        expires_after_s=row["expires_after_s"],
        state=row["state"],
        file_id=row["file_id"],
    )
