"""The schema, one step a version. A released step is never edited: a change is a further step."""

from __future__ import annotations

_FIRST = """
CREATE TABLE keys (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    scope TEXT NOT NULL,
    secret_sha256 BLOB NOT NULL UNIQUE,
    quota_json TEXT NOT NULL,
    created_at REAL NOT NULL,
    last_used_at REAL,
    revoked_at REAL
);

CREATE TABLE files (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,
    format TEXT,
    num_rows INTEGER
);
CREATE INDEX files_by_owner ON files (owner, created_at);
CREATE INDEX files_by_content ON files (sha256);

CREATE TABLE uploads (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    request_id TEXT,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    sha256 TEXT,
    created_at REAL NOT NULL,
    touched_at REAL NOT NULL,
    expires_after_s REAL,
    state TEXT NOT NULL,
    file_id TEXT
);
CREATE UNIQUE INDEX uploads_by_request ON uploads (owner, request_id) WHERE request_id IS NOT NULL;

CREATE TABLE upload_parts (
    id TEXT PRIMARY KEY,
    upload_id TEXT NOT NULL REFERENCES uploads (id) ON DELETE CASCADE,
    size_bytes INTEGER NOT NULL,
    created_at REAL NOT NULL
);

CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    request_id TEXT,
    name TEXT NOT NULL,
    spec_json TEXT NOT NULL,
    spec_sha256 TEXT NOT NULL,
    labels_json TEXT NOT NULL,
    origin_json TEXT NOT NULL,
    num_gpus INTEGER NOT NULL,
    max_attempts INTEGER NOT NULL,
    state TEXT NOT NULL,
    message TEXT NOT NULL,
    failure_json TEXT,
    progress BLOB NOT NULL,
    num_tokens INTEGER NOT NULL DEFAULT 0,
    created_at REAL NOT NULL,
    queued_at REAL NOT NULL,
    started_at REAL,
    finished_at REAL,
    attempt INTEGER NOT NULL,
    not_before REAL NOT NULL,
    run_dir TEXT,
    run_cursor INTEGER NOT NULL,
    last_sequence INTEGER NOT NULL,
    model_id TEXT,
    artifacts_json TEXT NOT NULL
);
CREATE UNIQUE INDEX jobs_by_request ON jobs (owner, request_id) WHERE request_id IS NOT NULL;
CREATE INDEX jobs_by_owner ON jobs (owner, created_at);
CREATE INDEX jobs_by_state ON jobs (state);

CREATE TABLE attempts (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    directory TEXT NOT NULL,
    gpus_json TEXT NOT NULL,
    process_json TEXT,
    started_at REAL NOT NULL,
    ended_at REAL,
    outcome TEXT,
    PRIMARY KEY (job_id, number)
);

CREATE TABLE job_events (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    sequence INTEGER NOT NULL,
    time REAL NOT NULL,
    attempt INTEGER NOT NULL,
    state TEXT,
    message TEXT,
    run BLOB,
    PRIMARY KEY (job_id, sequence)
) WITHOUT ROWID;

CREATE TABLE job_checkpoints (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    step INTEGER NOT NULL,
    path TEXT NOT NULL,
    created_at REAL NOT NULL,
    progress BLOB NOT NULL,
    PRIMARY KEY (job_id, step)
) WITHOUT ROWID;

CREATE TABLE job_files (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    file_id TEXT NOT NULL,
    PRIMARY KEY (job_id, file_id)
) WITHOUT ROWID;

CREATE TABLE models (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    kind TEXT NOT NULL,
    base_id TEXT,
    source TEXT NOT NULL,
    revision TEXT,
    content_id TEXT,
    size_bytes INTEGER NOT NULL,
    created_at REAL NOT NULL,
    job_id TEXT,
    lineage_json TEXT NOT NULL
);

CREATE TABLE model_aliases (
    name TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    model_id TEXT NOT NULL REFERENCES models (id) ON DELETE CASCADE,
    created_at REAL NOT NULL
)
"""

MIGRATIONS: tuple[str, ...] = (_FIRST,)
