"""`gym keys`: who may call a daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from cyclopts import App, Parameter

from gym_sdk.cli import console
from gym_sdk.cli._connection import AsJson, ConnectionOptions, connect
from gym_sdk.cli._table import age, out_list, plain
from gym_sdk.client.types import KeyInfo, KeyQuota, KeyScope

app: App = App(name="gym keys", help="API keys of a daemon. Every command needs an admin key.", version_flags=[])


@app.command
def create(
    name: str,
    /,
    *,
    admin: Annotated[bool, Parameter(negative="")] = False,
    max_running_jobs: int | None = None,
    max_queued_jobs: int | None = None,
    max_storage_gb: float | None = None,
    max_requests_per_minute: int | None = None,
    as_json: AsJson = False,
    connection: ConnectionOptions = None,
) -> None:
    """Make a key and print it. It cannot be shown again: the daemon keeps only its hash.

    Parameters
    ----------
    name
        Whose it is.
    admin
        A key for everything, instead of one for jobs, files, models and chats of its own.
    max_running_jobs
        Jobs that may run at once.
    max_queued_jobs
        Jobs that may wait.
    max_storage_gb
        What its files may take.
    max_requests_per_minute
        Calls in a minute.
    as_json
        Print JSON.
    """
    quota = KeyQuota(
        max_running_jobs=max_running_jobs,
        max_queued_jobs=max_queued_jobs,
        max_storage_bytes=None if max_storage_gb is None else int(max_storage_gb * 1e9),
        max_requests_per_minute=max_requests_per_minute,
    )
    with connect(connection) as gym:
        key, secret = gym.keys.create(name, scope=KeyScope.ADMIN if admin else KeyScope.USER, quota=quota)
    console.out_json({**plain(key), "secret": secret}) if as_json else console.out(secret)
    console.err(f"key {key.id} for {name}; give it away now, it cannot be shown again")


@app.command(name="list")
def list_keys(*, as_json: AsJson = False, connection: ConnectionOptions = None) -> None:
    """List keys, without their secrets.

    Parameters
    ----------
    as_json
        Print JSON.
    """
    with connect(connection) as gym:
        keys = list(gym.keys.list())
    out_list(keys, _COLUMNS, as_json=as_json, empty="no keys")


_COLUMNS: dict[str, Callable[[KeyInfo], object]] = {
    "ID": lambda key: key.id,
    "NAME": lambda key: key.name,
    "SCOPE": lambda key: key.scope or "?",
    "": lambda key: "revoked" if key.revoke_time else "",
    "AGE": lambda key: age(key.create_time),
}


@app.command
def revoke(*key_ids: str, connection: ConnectionOptions = None) -> None:
    """Let keys open nothing from now on. What they own stays."""
    with connect(connection) as gym:
        for key_id in key_ids:
            console.err(f"key {gym.keys.revoke(key_id).id} is revoked")
