"""What the daemon's services refuse, in one form that HTTP and gRPC both speak.

A `ServiceError` has a kind (which decides the HTTP status and the gRPC code), a reason (a stable word for programs), a
message for people and, where it has one, the field at fault. Errors of `gym_sdk.errors` become such by
`as_service_error`; anything else is a fault of the daemon, logged whole and told without its text.
"""

from __future__ import annotations

from enum import Enum

from gym_sdk.errors import DataError, DoesNotFit, GymError, ModelError, OutputInUse, SpecError, UserError


class Kind(Enum):
    """Name, HTTP status, gRPC status code, and the `type` of OpenAI's error body."""

    INVALID = (400, "INVALID_ARGUMENT", "invalid_request_error")
    UNAUTHENTICATED = (401, "UNAUTHENTICATED", "authentication_error")
    DENIED = (403, "PERMISSION_DENIED", "permission_error")
    NOT_FOUND = (404, "NOT_FOUND", "invalid_request_error")
    CONFLICT = (409, "FAILED_PRECONDITION", "invalid_request_error")
    TOO_LARGE = (413, "INVALID_ARGUMENT", "invalid_request_error")
    OUT_OF_RANGE = (416, "OUT_OF_RANGE", "invalid_request_error")
    EXHAUSTED = (429, "RESOURCE_EXHAUSTED", "rate_limit_error")
    INTERNAL = (500, "INTERNAL", "server_error")
    UNIMPLEMENTED = (501, "UNIMPLEMENTED", "invalid_request_error")
    UNAVAILABLE = (503, "UNAVAILABLE", "server_error")
    TIMED_OUT = (504, "DEADLINE_EXCEEDED", "server_error")

    def __init__(self, http_status: int, grpc_code: str, openai_type: str) -> None:
        self.http_status = http_status
        self.grpc_code = grpc_code
        self.openai_type = openai_type


class ServiceError(GymError):
    """A refusal with its kind, reason, field, and the wait after which trying again may help."""

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        reason: str,
        field: str | None = None,
        hint: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind
        self.reason = reason
        self.field = field
        self.retry_after_s = retry_after_s


def invalid(
    message: str, *, field: str | None = None, reason: str = "invalid_value", hint: str | None = None
) -> ServiceError:
    """The request itself is wrong."""
    return ServiceError(Kind.INVALID, message, reason=reason, field=field, hint=hint)


def not_found(what: str, name: str, *, field: str | None = None) -> ServiceError:
    """Nothing of that name that this key may see: what others own is not told apart from what does not exist."""
    return ServiceError(
        Kind.NOT_FOUND,
        f"no {what} '{name}'",
        reason=f"{what.replace(' ', '_').replace('-', '_')}_not_found",
        field=field,
    )


def conflict(message: str, *, reason: str, hint: str | None = None) -> ServiceError:
    """Right in itself, but not in the present state."""
    return ServiceError(Kind.CONFLICT, message, reason=reason, hint=hint)


_REASONS: tuple[tuple[type[GymError], str], ...] = (
    (SpecError, "invalid_spec"),
    (DataError, "invalid_data"),
    (ModelError, "invalid_model"),
    (DoesNotFit, "does_not_fit"),
    (OutputInUse, "output_in_use"),
    (UserError, "invalid_request"),
)


def as_service_error(error: BaseException) -> ServiceError:
    """What the caller is told of an exception."""
    if isinstance(error, ServiceError):
        return error
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            assert isinstance(error, GymError)
            place = str(error.where) if error.where else ""
            message = f"{place}: {error.message}" if place else error.message
            return ServiceError(
                Kind.INVALID, message, reason=reason, field=error.where.path if error.where else None, hint=error.hint
            )
    return ServiceError(
        Kind.INTERNAL,
        "the daemon failed at this request; its log has the details under the request's id",
        reason="internal",
    )
