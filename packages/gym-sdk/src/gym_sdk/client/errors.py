"""What a daemon refuses, and what goes wrong on the way to it.

GymError
└── RemoteError          code, reason, request_id, violations, hint
    ├── InvalidRequest       a field, the specification, or a dataset's row is wrong (exit code 2)
    ├── AuthenticationFailed no key, or one that the daemon does not know (2)
    ├── PermissionDenied     the key may not do this (2)
    ├── NotFound             nothing of that name (2)
    ├── Conflict             the state forbids it, or it exists already (2)
    ├── LimitExceeded        rate, quota or queue (1); `retry_after_s`
    ├── Unavailable          the daemon or its engine cannot be reached now (1)
    ├── TimedOut             the deadline is over (1)
    ├── Aborted              the call was cancelled (1)
    └── ServerFault          the daemon failed; its log has more under the request's id (1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gym_sdk.errors import GymError

__all__ = [
    "Aborted",
    "AuthenticationFailed",
    "Conflict",
    "FieldViolation",
    "InvalidRequest",
    "LimitExceeded",
    "NotFound",
    "PermissionDenied",
    "RemoteError",
    "ServerFault",
    "TimedOut",
    "Unavailable",
    "remote_error",
]


@dataclass(frozen=True)
class FieldViolation:
    """A field of the request that is at fault."""

    field: str
    """Its path, such as `train.learning_rate`."""
    description: str


class RemoteError(GymError):
    """A call to a daemon failed."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        reason: str = "",
        request_id: str = "",
        violations: tuple[FieldViolation, ...] = (),
        hint: str | None = None,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        """gRPC's name of the status: `NOT_FOUND`."""
        self.reason = reason
        """The daemon's own reason (`MODEL_NOT_FOUND`; see errors.proto); empty where it never answered."""
        self.request_id = request_id
        """Under which the daemon's log has the call."""
        self.violations = violations
        self.retry_after_s = retry_after_s
        self.metadata: dict[str, str] = dict(metadata or {})


class InvalidRequest(RemoteError):
    """A field of the request, the specification, or a row of a dataset is wrong."""

    exit_code = 2


class AuthenticationFailed(RemoteError):
    """No key, or one that the daemon does not know."""

    exit_code = 2


class PermissionDenied(RemoteError):
    """The key may not do this."""

    exit_code = 2


class NotFound(RemoteError):
    """Nothing of that name that this key may see."""

    exit_code = 2


class Conflict(RemoteError):
    """The resource's state forbids it, or it exists already."""

    exit_code = 2


class LimitExceeded(RemoteError):
    """Too many requests, too much storage, or too long a queue."""


class Unavailable(RemoteError):
    """The daemon or its engine cannot be reached now."""

    never_sent: bool = False
    """No connection was made, so the daemon has seen nothing of the call."""


class TimedOut(RemoteError):
    """The deadline is over."""


class Aborted(RemoteError):
    """The call was cancelled."""


class ServerFault(RemoteError):
    """The daemon failed at this request."""

    def __str__(self) -> str:
        return f"{super().__str__()}\nrequest: {self.request_id}" if self.request_id else super().__str__()


_CLASSES: dict[str, type[RemoteError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
    "UNAUTHENTICATED": AuthenticationFailed,
    "PERMISSION_DENIED": PermissionDenied,
    "NOT_FOUND": NotFound,
    "ALREADY_EXISTS": Conflict,
    "FAILED_PRECONDITION": Conflict,
    "ABORTED": Conflict,
    "RESOURCE_EXHAUSTED": LimitExceeded,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": TimedOut,
    "CANCELLED": Aborted,
}


def remote_error(
    code: str,
    message: str,
    *,
    request_id: str = "",
    details: Mapping[str, bytes] | None = None,
) -> RemoteError:
    """The error of a status. `details` are serialized google.rpc messages by their full name."""
    reason, hint = "", None
    metadata: dict[str, str] = {}
    violations: tuple[FieldViolation, ...] = ()
    retry_after_s = None
    if details:
        # Imported here: most programs never meet an error with details.
        from google.protobuf.message import DecodeError
        from google.rpc import error_details_pb2

        try:
            if (data := details.get("google.rpc.ErrorInfo")) is not None:
                info = error_details_pb2.ErrorInfo.FromString(data)
                reason, metadata = info.reason, dict(info.metadata)
                hint = metadata.pop("hint", None)
            if (data := details.get("google.rpc.BadRequest")) is not None:
                request = error_details_pb2.BadRequest.FromString(data)
                violations = tuple(FieldViolation(each.field, each.description) for each in request.field_violations)
            if (data := details.get("google.rpc.RetryInfo")) is not None:
                delay = error_details_pb2.RetryInfo.FromString(data).retry_delay
                retry_after_s = delay.seconds + delay.nanos / 1e9
        except DecodeError:
            message = f"{message} (with details that cannot be read)"
    return _CLASSES.get(code, ServerFault)(
        message or code.lower().replace("_", " "),
        code=code,
        reason=reason,
        request_id=request_id,
        violations=violations,
        hint=hint,
        retry_after_s=retry_after_s,
        metadata=metadata,
    )
