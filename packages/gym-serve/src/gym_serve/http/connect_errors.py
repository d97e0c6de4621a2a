"""Errors as the Connect protocol says them."""

from __future__ import annotations

import base64

from starlette.responses import JSONResponse

from gym_serve.errors import ServiceError
from gym_serve.grpc.server import rich_status

_CODES = {
    "INVALID_ARGUMENT": (400, "invalid_argument"),
    "UNAUTHENTICATED": (401, "unauthenticated"),
    "PERMISSION_DENIED": (403, "permission_denied"),
    "NOT_FOUND": (404, "not_found"),
    "ALREADY_EXISTS": (409, "already_exists"),
    "RESOURCE_EXHAUSTED": (429, "resource_exhausted"),
    "FAILED_PRECONDITION": (400, "failed_precondition"),
    "OUT_OF_RANGE": (400, "out_of_range"),
    "DATA_LOSS": (500, "data_loss"),
    "UNAVAILABLE": (503, "unavailable"),
    "INTERNAL": (500, "internal"),
    "DEADLINE_EXCEEDED": (504, "deadline_exceeded"),
}
"""HTTP status and code of Connect, by the gRPC code."""


def connect_error(error: ServiceError) -> dict[str, object]:
    """The body of an error, and the error of an ended stream."""
    status = rich_status(error)
    return {
        "code": _CODES[error.reason.terms.grpc_code][1],
        "message": error.message,
        "details": [
            {
                "type": detail.type_url.rpartition("/")[2],
                "value": base64.b64encode(detail.value).rstrip(b"=").decode(),
            }
            for detail in status.details
        ],
    }


def connect_error_response(error: ServiceError) -> JSONResponse:
    """An error of a unary call."""
    return JSONResponse(connect_error(error), status_code=_CODES[error.reason.terms.grpc_code][0])
