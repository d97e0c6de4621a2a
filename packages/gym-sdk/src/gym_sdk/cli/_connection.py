"""The options of every command that calls a daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from gym_sdk.client import Gym

CONNECT_TIMEOUT_S = 3.0
"""A person waits for the answer."""


@dataclass(frozen=True, kw_only=True)
class Connection:
    """Which daemon to call. The key comes from GYM_API_KEY, the profile, or this machine's own daemon."""

    base_url: str | None = None
    """The daemon's address: grpc://host:50051, grpcs://host, http://host:8000 or https://host."""

    profile: str | None = None
    """A profile of the profile file."""


ConnectionOptions = Annotated[Connection | None, Parameter(name="*", group="Daemon")]
AsJson = Annotated[bool, Parameter(name="--json", negative="")]


@contextmanager
def connect(connection: Connection | None) -> Iterator[Gym]:
    """A client of the daemon that the options name."""
    chosen = connection or Connection()
    with Gym(chosen.base_url, profile=chosen.profile, connect_timeout_s=CONNECT_TIMEOUT_S) as gym:
        yield gym
