"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse

from gym_serve.errors import FieldViolation, Reason, ServiceError

M = TypeVar("M", bound=BaseModel)
_encode_json = msgspec.json.Encoder().encode


def error_body(error: ServiceError) -> dict[str, object]:
    """The body of an error response, and the data of an error frame in a stream."""
    message = f"{error.message}\nhint: {error.hint}" if error.hint else error.message
    body: dict[str, object] = {
        "message": message,
        "type": error.reason.terms.openai_type,
        "param": error.field,
        "code": error.openai_code,
    }
    return {"error": body}


def error_response(error: ServiceError) -> JSONResponse:
    """The error as a response, with the headers that tell the official client whether to try again."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after_s * 1000)))
    if error.http_status in (408, 409) or error.reason is Reason.QUOTA_EXCEEDED:
        # It would send a conflict and a spent quota again and again.
        headers["x-should-retry"] = "false"
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)


async def read_body(request: Request, model: type[M]) -> M:
    """The request's JSON body as `model`. Raises `ServiceError` with every field that is wrong."""
    return parse_body(await request.body(), model)


def parse_body(body: bytes, model: type[M]) -> M:
    """A JSON body as `model`."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _invalid_body(error) from None
    except RecursionError:
        raise ServiceError(Reason.REQUEST_INVALID, "the body is nested too deeply") from None


def _invalid_body(error: ValidationError) -> ServiceError:
    violations = []
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).removeprefix(".")
        violations.append(FieldViolation(field=path, description=fault["msg"].removeprefix("Value error, ")))
    first = violations[0]
    message = f"{first.field}: {first.description}" if first.field else first.description
    if len(violations) > 1:
        message += f" (and {len(violations) - 1} more)"
    return ServiceError(Reason.REQUEST_INVALID, message, violations=[v for v in violations if v.field])


def sse(data: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode_json(data) + b"\n\n"


SSE_END = b"data: [DONE]\n\n"
