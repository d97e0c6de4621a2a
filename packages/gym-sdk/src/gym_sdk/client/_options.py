"""What both ends must agree on: gRPC options, and where this machine's own key lies. Loads no grpc."""

from __future__ import annotations

from pathlib import Path

from gym_sdk.folders import data_dir

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""Long chats fit; files go in chunks."""

KEEPALIVE_TIME_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 20_000

_SIZES: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_SIZES,
    # A quiet stream (a job between two events) must not be cut by a router, nor wait for ever on a dead line.
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    # A daemon that restarts is back in seconds; by default gRPC tries after 1, 1.6, 2.6 ... 120 s.
    ("grpc.initial_reconnect_backoff_ms", 250),
    ("grpc.min_reconnect_backoff_ms", 250),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Retries are the client's own: it knows which calls are safe to repeat.
    ("grpc.enable_retries", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_SIZES,
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    # Otherwise the server takes the client's pings for an attack and closes the connection.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
    # One daemon a port: a second one must fail to bind instead of sharing it.
    ("grpc.so_reuseport", 0),
)


def local_key_path(folder: Path | None = None) -> Path:
    """The key that a daemon makes on its first start for the user of its own machine (mode 0600), as one line of text.

    `folder` is the daemon's data directory; the default one when not given.
    """
    return (folder or data_dir()) / "local.key"


def local_address_path(folder: Path | None = None) -> Path:
    """Where a daemon says at which addresses it listens: JSON with `grpc_target` and `http_url`."""
    return (folder or data_dir()) / "daemon.json"
