"""Who calls: keys, their scopes, and the local key.

A key is 32 random bytes in URL-safe text after `gym-`; the database keeps its SHA-256 only. That much randomness
needs no slow hash: there is nothing to guess. Scopes: a `user` sees and changes its own jobs, files and models and may
generate; an `admin` also manages models that all see, other keys' jobs, and reads the metrics.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import json
import logging
import os
import secrets
import sqlite3
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from gym_sdk.errors import UserError, Where
from gym_serve._database import Database
from gym_serve.errors import Reason, ServiceError

logger: logging.Logger = logging.getLogger(__name__)

_LOCAL_KEY_NAME = "local"
_MEMORY_S = 60.0
"""How long a looked-up key is believed. Revoking one ends that at once: only this process writes the database."""
_USE_S = 60.0
"""How fine the time of a key's last use is kept."""
_STATES_OF_RUNNING_JOBS = ("starting", "running", "pausing", "cancelling")


class Scope(StrEnum):
    """What a key may do."""

    USER = "user"
    ADMIN = "admin"


@dataclass(frozen=True, kw_only=True)
class Quota:
    """Limits of one key; None is the daemon's own setting."""

    max_running_jobs: int | None = None
    max_queued_jobs: int | None = None
    max_storage_bytes: int | None = None
    max_requests_per_minute: int | None = None
    max_concurrent_requests: int | None = None


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key without its secret."""

    id: str
    name: str
    scope: Scope
    quota: Quota = Quota()
    created_at: float = 0.0
    last_used_at: float | None = None
    revoked_at: float | None = None

    @property
    def is_admin(self) -> bool:
        """Whether it has the admin scope."""
        return self.scope is Scope.ADMIN

    def may_see(self, owner: str) -> bool:
        """Whether what `owner` (a key's id) made is this key's business."""
        return self.is_admin or owner == self.id


def make_secret() -> str:
    """A new key's text."""
    return "gym-" + secrets.token_urlsafe(32)


def digest(secret: str) -> bytes:
    """What the database keeps of a key."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def insert_key(connection: sqlite3.Connection, name: str, scope: Scope, secret: str, quota: Quota | None = None) -> Key:
    """Stores a key. Names are unique among keys that are not revoked."""
    if not 0 < len(name) <= 200 or not name.isprintable():
        raise UserError("a key's name has 1 to 200 printable characters")
    if connection.execute("SELECT 1 FROM keys WHERE name = ? AND revoked_at IS NULL", (name,)).fetchone():
        raise UserError(f"there is a key named '{name}' already", hint="revoke it first, or choose another name")
    key = Key(id=f"key-{secrets.token_hex(8)}", name=name, scope=scope, quota=quota or Quota(), created_at=time.time())
    connection.execute(
        "INSERT INTO keys (id, name, scope, secret_sha256, quota_json, created_at) VALUES (?, ?, ?, ?, ?, ?)",
        (key.id, name, scope.value, digest(secret), json.dumps(dataclasses.asdict(key.quota)), key.created_at),
    )
    return key


def revoke_key(connection: sqlite3.Connection, name_or_id: str) -> Key:
    """Ends a key; running requests of it go on, new ones are refused within seconds."""
    row = connection.execute(
        "SELECT * FROM keys WHERE (name = ?1 OR id = ?1) AND revoked_at IS NULL", (name_or_id,)
    ).fetchone()
    if row is None:
        raise UserError(f"no key '{name_or_id}'", hint="gym keys list shows them")
    connection.execute("UPDATE keys SET revoked_at = ? WHERE id = ?", (time.time(), row["id"]))
    return _key_of(row)


def list_keys(connection: sqlite3.Connection) -> list[Key]:
    """Every key, the revoked ones included, oldest first."""
    return [_key_of(row) for row in connection.execute("SELECT * FROM keys ORDER BY created_at")]


def _key_of(row: sqlite3.Row) -> Key:
    return Key(
        id=row["id"],
        name=row["name"],
        scope=Scope(row["scope"]),
        quota=Quota(**json.loads(row["quota_json"])),
        created_at=row["created_at"],
        last_used_at=row["last_used_at"],
        revoked_at=row["revoked_at"],
    )


class JobKeys:
    """Keys by which a job calls the daemon that runs it, as its owner and no longer than it runs.

    Nothing is stored for them: a job's key is an HMAC of its id, so a restarted daemon knows those of its jobs again.
    """

    _PREFIX = "gym-job."

    def __init__(self, path: Path) -> None:
        """`path` holds the daemon's own secret; it is made (mode 0600) when it is not there."""
        if not path.exists():
            write_private(path, secrets.token_hex(32))
        self._secret = path.read_bytes()

    def secret_of(self, job_id: str) -> str:
        """The key of a job."""
        return f"{self._PREFIX}{job_id}.{hmac.new(self._secret, job_id.encode(), hashlib.sha256).hexdigest()}"

    def job_of(self, secret: str) -> str | None:
        """The job whose key this is; None where it is none."""
        if not secret.startswith(self._PREFIX):
            return None
        job_id = secret.removeprefix(self._PREFIX).rpartition(".")[0]
        own = self.secret_of(job_id).encode()
        return job_id if hmac.compare_digest(own, secret.encode("utf-8", "surrogateescape")) else None


class Keyring:
    """Answers whose key a secret is."""

    def __init__(
        self, database: Database, static: dict[bytes, Key] | None = None, job_keys: JobKeys | None = None
    ) -> None:
        self._database = database
        self._static = static or {}
        self._job_keys = job_keys
        self._memory: dict[bytes, tuple[float, Key]] = {}
        self._marking: set[asyncio.Future[None]] = set()

    async def authenticate(self, authorization: str | None) -> Key:
        """The key of an `Authorization: Bearer ...` value; a `ServiceError` where there is none or it is not known."""
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise ServiceError(
                Reason.KEY_MISSING,
                "no API key was given",
                hint="send it as 'Authorization: Bearer KEY'; 'gym keys create' on the daemon's machine makes one",
            )
        hashed = digest(secret.strip())
        if (key := self._static.get(hashed)) is not None:
            return key
        if self._job_keys is not None and (job_id := self._job_keys.job_of(secret.strip())) is not None:
            return await self._of_job(job_id)
        now = time.monotonic()
        remembered = self._memory.get(hashed)
        if remembered is not None and now - remembered[0] < _MEMORY_S:
            return remembered[1]
        row = await self._database.read(
            lambda connection: connection.execute(
                "SELECT * FROM keys WHERE secret_sha256 = ? AND revoked_at IS NULL", (hashed,)
            ).fetchone()
        )
        if row is None:
            self._memory.pop(hashed, None)
            raise ServiceError(Reason.KEY_INVALID, "the API key is not known here")
        key = _key_of(row)
        self._memory[hashed] = (now, key)
        if time.time() - (key.last_used_at or 0.0) > _USE_S:
            # Beside the call, which need not wait for the disk.
            task = asyncio.ensure_future(self._database.write(partial(_mark_used, key_id=key.id)))
            self._marking.add(task)
            task.add_done_callback(self._marked)
        return key

    def _marked(self, task: asyncio.Future[None]) -> None:
        self._marking.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a key's last use was not written down: %s", error)

    async def _of_job(self, job_id: str) -> Key:
        """The owner of a job that runs, without an admin's rights."""

        def look(connection: sqlite3.Connection) -> tuple[str, Key | None]:
            job = connection.execute("SELECT owner, state FROM jobs WHERE id = ?", (job_id,)).fetchone()
            if job is None or job["state"] not in _STATES_OF_RUNNING_JOBS:
                return "", None
            row = connection.execute(
                "SELECT * FROM keys WHERE id = ? AND revoked_at IS NULL", (job["owner"],)
            ).fetchone()
            return job["owner"], _key_of(row) if row is not None else None

        owner, key = await self._database.read(look)
        key = key or next((each for each in self._static.values() if each.id == owner), None)
        if key is None:
            raise ServiceError(Reason.KEY_INVALID, "the key is of a job that does not run")
        return dataclasses.replace(key, name=f"{key.name}'s {job_id}", scope=Scope.USER)

    def forget(self) -> None:
        """Looks every key up again."""
        self._memory.clear()


def _mark_used(connection: sqlite3.Connection, *, key_id: str) -> None:
    connection.execute("UPDATE keys SET last_used_at = ? WHERE id = ?", (time.time(), key_id))


def require_admin(key: Key) -> None:
    """A `ServiceError` unless the key has the admin scope."""
    if not key.is_admin:
        raise ServiceError(Reason.ADMIN_REQUIRED, "this call needs a key with the admin scope")


def take_environment_keys(environment: MutableMapping[str, str]) -> dict[bytes, Key]:
    """The keys given as `GYM_API_KEY` and `GYM_ADMIN_KEY`, which are removed so that no child process inherits them."""
    keys: dict[bytes, Key] = {}
    for variable, scope in (("GYM_API_KEY", Scope.USER), ("GYM_ADMIN_KEY", Scope.ADMIN)):
        secret = environment.pop(variable, "").strip()
        if not secret:
            continue
        if len(secret) < 16:
            raise UserError(
                f"{variable} is shorter than 16 characters, so it could be guessed",
                hint="gym keys create makes a good one",
            )
        keys[digest(secret)] = Key(id=f"key-{variable.lower().replace('_', '-')}", name=variable, scope=scope)
    return keys


def ensure_local_key(connection: sqlite3.Connection, path: Path) -> str:
    """The secret of the key that this machine's user finds in `path` (mode 0600); made on the first start.

    A file that others can read is refused; one that the database does not know any more is written anew.
    """
    try:
        mode = path.stat().st_mode & 0o777
    except FileNotFoundError:
        pass
    else:
        if mode & 0o077:
            raise UserError(
                f"the local key can be read by others (mode {mode:04o})",
                where=Where(file=str(path)),
                hint=f"chmod 600 {path}, or remove it and a new one is made",
            )
        secret = path.read_text(encoding="ascii").strip()
        row = connection.execute(
            "SELECT 1 FROM keys WHERE secret_sha256 = ? AND revoked_at IS NULL", (digest(secret),)
        ).fetchone()
        if row is not None:
            return secret
    secret = make_secret()
    connection.execute(
        "UPDATE keys SET revoked_at = ? WHERE name = ? AND revoked_at IS NULL", (time.time(), _LOCAL_KEY_NAME)
    )
    insert_key(connection, _LOCAL_KEY_NAME, Scope.ADMIN, secret)
    write_private(path, secret + "\n")
    return secret


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
