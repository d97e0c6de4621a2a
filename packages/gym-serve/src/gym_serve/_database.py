"""The daemon's SQLite file: one writer thread, one reader thread, migrations in order.

WAL lets readers go on while a transaction is written; `synchronous=FULL` makes an accepted job survive a power cut.
The event loop never waits for the disk: both threads are reached by `await`.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from gym_sdk.errors import UserError, Where
from gym_serve._migrations import MIGRATIONS

T = TypeVar("T")


class Database:
    """`await write(function)` and `await read(function)`, each `function(connection)` in its thread.

    A write is one transaction: it is committed when the function returns, and undone when it raises.
    """

    def __init__(self, path: Path) -> None:
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="database-writer")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="database-reader")
        try:
            self._writing = self._writer.submit(connect, path).result()
            self._writer.submit(migrate, self._writing, path).result()
        except sqlite3.DatabaseError as error:
            raise UserError(
                f"the database cannot be opened: {error}",
                where=Where(file=str(path)),
                hint="restore it from a backup, or give this daemon a directory of its own with --data-dir",
            ) from None
        self._reading = self._reader.submit(connect, path).result()

    async def write(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Runs a transaction that may change the database."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, transact, self._writing, function)

    def write_now(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """`write` for a thread that is not the event loop's: returns when the transaction is on disk."""
        return self._writer.submit(transact, self._writing, function).result()

    async def read(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Runs a function that only reads. It sees every write that was awaited before."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, function, self._reading)

    def close(self) -> None:
        """Waits for what is running, then closes both connections."""
        for executor, connection in ((self._writer, self._writing), (self._reader, self._reading)):
            executor.submit(connection.close).result()
            executor.shutdown()


def connect(path: Path) -> sqlite3.Connection:
    """A connection in autocommit mode with the daemon's settings; rows are read by column name."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA busy_timeout = 10000")
    return connection


def transact(connection: sqlite3.Connection, function: Callable[[sqlite3.Connection], T]) -> T:
    """Runs `function` in one immediate transaction."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = function(connection)
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
    return result


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Brings the schema to this version, one transaction a step. A database of a newer version is refused."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        raise UserError(
            f"the database has schema version {version}, and this gym-serve knows versions up to {len(MIGRATIONS)}",
            where=Where(file=str(path)),
            hint="start the gym-serve that wrote it, or a newer one",
        )
    for number in range(version, len(MIGRATIONS)):

        def step(connection: sqlite3.Connection, number: int = number) -> None:
            for statement in MIGRATIONS[number].split(";"):
                if statement.strip():
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number + 1}")

        transact(connection, step)
