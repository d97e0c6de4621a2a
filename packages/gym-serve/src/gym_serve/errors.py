"""What the daemon's services refuse, in one form that HTTP and gRPC both speak.

A `ServiceError` has a reason, a message for people and, where it has them, the fields at fault and a hint. Reasons are
those of `gym.v1.ErrorReason` (proto/gym/v1/errors.proto); each decides the gRPC code, the HTTP status and the words of
OpenAI's error body. Errors of `gym_sdk.errors` become such by `as_service_error`; anything else is a fault of the
daemon, logged whole and told without its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from gym_sdk.errors import DataError, GymError, ModelError, SpecError, UserError


class Reason(StrEnum):
    """`gym.v1.ErrorReason` without its prefix."""

    REQUEST_INVALID = "REQUEST_INVALID"
    SPEC_INVALID = "SPEC_INVALID"
    DATASET_INVALID = "DATASET_INVALID"
    CONTEXT_TOO_LONG = "CONTEXT_TOO_LONG"
    ADAPTER_INVALID = "ADAPTER_INVALID"
    KEY_MISSING = "KEY_MISSING"
    KEY_INVALID = "KEY_INVALID"
    ADMIN_REQUIRED = "ADMIN_REQUIRED"
    NOT_YOURS = "NOT_YOURS"
    JOB_NOT_FOUND = "JOB_NOT_FOUND"
    FILE_NOT_FOUND = "FILE_NOT_FOUND"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    UPLOAD_NOT_FOUND = "UPLOAD_NOT_FOUND"
    KEY_NOT_FOUND = "KEY_NOT_FOUND"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    ALIAS_TAKEN = "ALIAS_TAKEN"
    RATE_LIMITED = "RATE_LIMITED"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    QUEUE_FULL = "QUEUE_FULL"
    WRONG_STATE = "WRONG_STATE"
    IN_USE = "IN_USE"
    NOT_INSTALLED = "NOT_INSTALLED"
    OFFSET_MISMATCH = "OFFSET_MISMATCH"
    CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH"
    ENGINE_DOWN = "ENGINE_DOWN"
    DRAINING = "DRAINING"
    INTERNAL = "INTERNAL"
    TIMED_OUT = "TIMED_OUT"

    @property
    def terms(self) -> Terms:
        """How the two interfaces say it."""
        return _TERMS[self]


@dataclass(frozen=True)
class Terms:
    """gRPC status code, HTTP status, and the `type` and `code` of OpenAI's error body."""

    grpc_code: str
    http_status: int
    openai_type: str
    openai_code: str


def _table() -> dict[Reason, Terms]:
    own_codes = {
        Reason.REQUEST_INVALID: "invalid_value",
        Reason.DATASET_INVALID: "invalid_file_format",
        Reason.CONTEXT_TOO_LONG: "context_length_exceeded",
        Reason.KEY_MISSING: "missing_api_key",
        Reason.KEY_INVALID: "invalid_api_key",
        Reason.RATE_LIMITED: "rate_limit_exceeded",
        Reason.QUOTA_EXCEEDED: "insufficient_quota",
    }
    groups = (
        (
            "INVALID_ARGUMENT",
            400,
            "invalid_request_error",
            (
                Reason.REQUEST_INVALID,
                Reason.SPEC_INVALID,
                Reason.DATASET_INVALID,
                Reason.CONTEXT_TOO_LONG,
                Reason.ADAPTER_INVALID,
            ),
        ),
        (
            "UNAUTHENTICATED",
            401,
            "authentication_error",
            (
                Reason.KEY_MISSING,
                Reason.KEY_INVALID,
            ),
        ),
        (
            "PERMISSION_DENIED",
            403,
            "permission_error",
            (
                Reason.ADMIN_REQUIRED,
                Reason.NOT_YOURS,
            ),
        ),
        (
            "NOT_FOUND",
            404,
            "invalid_request_error",
            (
                Reason.JOB_NOT_FOUND,
                Reason.FILE_NOT_FOUND,
                Reason.MODEL_NOT_FOUND,
                Reason.UPLOAD_NOT_FOUND,
                Reason.KEY_NOT_FOUND,
            ),
        ),
        (
            "ALREADY_EXISTS",
            409,
            "invalid_request_error",
            (
                Reason.REQUEST_ID_REUSED,
                Reason.ALIAS_TAKEN,
            ),
        ),
        (
            "RESOURCE_EXHAUSTED",
            429,
            "rate_limit_error",
            (
                Reason.RATE_LIMITED,
                Reason.QUOTA_EXCEEDED,
                Reason.QUEUE_FULL,
            ),
        ),
        (
            "FAILED_PRECONDITION",
            409,
            "invalid_request_error",
            (
                Reason.WRONG_STATE,
                Reason.IN_USE,
                Reason.NOT_INSTALLED,
            ),
        ),
        ("OUT_OF_RANGE", 416, "invalid_request_error", (Reason.OFFSET_MISMATCH,)),
        ("DATA_LOSS", 400, "invalid_request_error", (Reason.CHECKSUM_MISMATCH,)),
        (
            "UNAVAILABLE",
            503,
            "server_error",
            (
                Reason.ENGINE_DOWN,
                Reason.DRAINING,
            ),
        ),
        ("INTERNAL", 500, "server_error", (Reason.INTERNAL,)),
        ("DEADLINE_EXCEEDED", 504, "server_error", (Reason.TIMED_OUT,)),
    )
    return {
        reason: Terms(grpc_code, http_status, openai_type, own_codes.get(reason, reason.lower()))
        for grpc_code, http_status, openai_type, reasons in groups
        for reason in reasons
    }


_TERMS = _table()


@dataclass(frozen=True, kw_only=True)
class FieldViolation:
    """A field of the request that is at fault, by its path."""

    field: str
    description: str


class ServiceError(GymError):
    """A refusal, or a failure that the caller is told of."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        field: str | None = None,
        violations: Sequence[FieldViolation] = (),
        hint: str | None = None,
        retry_after_s: float | None = None,
        metadata: dict[str, str] | None = None,
        http_status: int | None = None,
        openai_code: str | None = None,
    ) -> None:
        """`field` is short for one violation with the message itself. `http_status` and `openai_code` stand in for the
        reason's own where OpenAI's API has words for this very case."""
        super().__init__(message, hint=hint)
        own = (FieldViolation(field=field, description=message),) if field else ()
        self.reason: Reason = reason
        self.violations: tuple[FieldViolation, ...] = tuple(violations) or own
        self.retry_after_s: float | None = retry_after_s
        self.metadata: dict[str, str] = metadata or {}
        self.http_status: int = http_status or reason.terms.http_status
        self.openai_code: str = openai_code or reason.terms.openai_code

    @property
    def field(self) -> str | None:
        """The first field at fault."""
        return self.violations[0].field if self.violations else None


def invalid(message: str, *, field: str | None = None, hint: str | None = None) -> ServiceError:
    """A field of the request is wrong."""
    return ServiceError(Reason.REQUEST_INVALID, message, field=field, hint=hint)


_NOUNS = {
    Reason.JOB_NOT_FOUND: "job",
    Reason.FILE_NOT_FOUND: "file",
    Reason.MODEL_NOT_FOUND: "model",
    Reason.UPLOAD_NOT_FOUND: "upload",
    Reason.KEY_NOT_FOUND: "key",
}


def not_found(reason: Reason, name: str, *, field: str | None = None, hint: str | None = None) -> ServiceError:
    """Nothing of that name that this key may see: what others own is not told apart from what does not exist."""
    return ServiceError(reason, f"there is no {_NOUNS[reason]} '{name}'", field=field, hint=hint)


def as_service_error(error: BaseException) -> ServiceError:
    """What the caller is told of an exception."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, UserError):
        place = str(error.where) if error.where else ""
        message = f"{place}: {error.message}" if place else error.message
        if isinstance(error, SpecError):
            violations = [
                FieldViolation(field=problem.where.path or "", description=problem.message)
                for problem in error.problems
            ]
            return ServiceError(Reason.SPEC_INVALID, message, violations=violations, hint=error.hint)
        reason = Reason.REQUEST_INVALID
        if isinstance(error, DataError):
            reason = Reason.DATASET_INVALID
        elif isinstance(error, ModelError):
            reason = Reason.ADAPTER_INVALID
        return ServiceError(reason, message, field=error.where.path if error.where else None, hint=error.hint)
    return ServiceError(
        Reason.INTERNAL, "the daemon failed at this request; its log has the details under the request's id"
    )
