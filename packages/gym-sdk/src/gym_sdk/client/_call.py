"""What every call carries, and how its failure is read; shared by the transports."""

from __future__ import annotations

import base64
import json
import platform
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gym_sdk.client.errors import RemoteError, Unavailable, remote_error
from gym_sdk.client.settings import Settings

DETAILS_KEY = "grpc-status-details-bin"
NO_CONNECTION = ("failed to connect to all addresses", "DNS resolution failed", "errors resolving")
"""How gRPC's core begins its message when it had no connection to send a call on (the same in 1.66 and 1.85)."""
HTTP_CODES = {
    400: "INTERNAL",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "UNIMPLEMENTED",
    408: "DEADLINE_EXCEEDED",
    429: "UNAVAILABLE",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "UNAVAILABLE",
}
"""What an answer means that no daemon of ours wrote (a proxy's); as the Connect protocol has it."""


def client_name() -> str:
    """`gym-sdk/0.1.0 python/3.11.7`."""
    try:
        own = version("gym-sdk")
    except PackageNotFoundError:
        own = "unknown"
    return f"gym-sdk/{own} python/{platform.python_version()}"


@dataclass(frozen=True)
class CallHeaders:
    """The metadata of one call."""

    api_key: str
    client: str
    request_id: str = field(default_factory=lambda: f"req-{uuid.uuid4().hex}")

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """As gRPC metadata or HTTP headers."""
        pairs = (("x-request-id", self.request_id), ("x-gym-client", self.client))
        return (*pairs, ("authorization", f"Bearer {self.api_key}")) if self.api_key else pairs


def grpc_failure(error: Any, request_id: str, settings: Settings) -> RemoteError:
    """The error behind a grpc.RpcError (sync or aio)."""
    code = error.code().name
    trailers = dict(error.trailing_metadata() or ())
    request_id = str(trailers.get("x-request-id") or request_id)
    details = _status_details(trailers.get(DETAILS_KEY))
    message = error.details() or ""
    if code == "UNAVAILABLE" and not details:
        return cannot_reach(settings, message, request_id, never_sent=message.startswith(NO_CONNECTION))
    return remote_error(code, message, request_id=request_id, details=details)


def cannot_reach(settings: Settings, problem: str, request_id: str, *, never_sent: bool = False) -> Unavailable:
    """Nobody answers there, or no longer."""
    brief = " ".join(problem.split())
    if "Connection refused" in brief:
        brief = "connection refused"
    message = f"no daemon answers at {settings.base_url}"
    if not never_sent:
        message = f"the connection to {settings.base_url} broke"
        hint = "the daemon was restarted, or the line was cut; try again"
    elif settings.is_local and settings.origin == "default":
        hint = "start one with `gym serve`, or name another with --base-url, GYM_BASE_URL or a profile"
    else:
        hint = f"the address is from {settings.origin}; is the daemon running, and does a firewall let you through?"
    error = Unavailable(
        message + (f" ({brief[:200]})" if brief else ""),
        code="UNAVAILABLE",
        request_id=request_id,
        hint=hint,
    )
    error.never_sent = never_sent
    return error


def connect_failure(status: int, body: bytes, request_id: str) -> RemoteError:
    """The error behind an answer of the Connect protocol (JSON), or of something in between."""
    try:
        data = json.loads(body)
        code = str(data["code"]).upper()
    except (ValueError, KeyError, TypeError):
        text = body[:200].decode("utf-8", "replace").strip()
        message = f"HTTP {status}" + (f": {' '.join(text.split())}" if text else "")
        return remote_error(HTTP_CODES.get(status, "UNKNOWN"), message, request_id=request_id)
    return remote_error(
        "CANCELLED" if code == "CANCELED" else code,
        str(data.get("message", "")),
        request_id=request_id,
        details=dict(_connect_details(data.get("details") or ())),
    )


def _connect_details(details: Iterable[Any]) -> Iterable[tuple[str, bytes]]:
    for detail in details:
        try:
            value = str(detail["value"])
            yield str(detail["type"]), base64.b64decode(value + "=" * (-len(value) % 4))
        except (KeyError, TypeError, ValueError):
            continue


def _status_details(data: Any) -> dict[str, bytes]:
    if not isinstance(data, bytes):
        return {}
    from google.protobuf.message import DecodeError
    from google.rpc import status_pb2

    try:
        status = status_pb2.Status.FromString(data)
    except DecodeError:
        return {}
    return {detail.type_url.rpartition("/")[2]: detail.value for detail in status.details}
