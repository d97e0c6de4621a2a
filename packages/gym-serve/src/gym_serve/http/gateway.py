"""What every HTTP call passes: request id, key, limits, size, errors in one form, log, metrics. Plain ASGI."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from gym_serve.auth import Keyring
from gym_serve.call import Call
from gym_serve.errors import Reason, ServiceError, as_service_error
from gym_serve.http.connect_errors import connect_error_response
from gym_serve.http.errors import error_response
from gym_serve.limits import RateLimiter
from gym_serve.logs import audit, request_id
from gym_serve.metrics import Metrics

logger: logging.Logger = logging.getLogger("gym_serve.access")

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""What needs no key."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def call_of(request: Request) -> Call:
    """The call that a request is."""
    return request.scope["gym.call"]


class Gateway:
    """Wraps the routes."""

    def __init__(
        self, routes: Sequence[Route], *, keyring: Keyring, rates: RateLimiter, metrics: Metrics, max_request_bytes: int
    ) -> None:
        self.routes = routes
        self._app = Router(routes, redirect_slashes=False)
        self._keyring = keyring
        self._rates = rates
        self._metrics = metrics
        self._max_request_bytes = max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        identity = given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        token = request_id.set(identity)
        started = time.monotonic()
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = MutableHeaders(scope=message)
                own["x-request-id"] = identity
                own["openai-processing-ms"] = str(int((time.monotonic() - started) * 1000))
                own["x-content-type-options"] = "nosniff"
            await send(message)

        try:
            await self._handle(scope, receive, answer, headers, identity)
        except ClientDisconnect:
            logger.info("client went away", extra={"path": scope["path"]})
        except Exception as error:
            # A started answer cannot become an error any more: the connection is cut, so nobody takes it for whole.
            if status:
                logger.exception("%s %s failed after its answer had begun", scope["method"], scope["path"])
                raise
            await self._refuse(error, scope, receive, answer)
        finally:
            seconds = time.monotonic() - started
            route = scope.get("gym.route") or getattr(scope.get("route"), "path", "unknown")
            self._metrics.requests.labels("http", route, str(status)).inc()
            self._metrics.request_seconds.labels("http", route).observe(seconds)
            key = scope["gym.call"].key.name if "gym.call" in scope else None
            if scope["path"] not in OPEN_PATHS:
                logger.info(
                    "%s %s %d",
                    scope["method"],
                    scope["path"],
                    status,
                    extra={"duration_ms": round(seconds * 1000, 1), "key": key},
                )
            request_id.reset(token)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, headers: Headers, identity: str) -> None:
        if scope["path"] not in OPEN_PATHS:
            try:
                key = await self._keyring.authenticate(headers.get("authorization"))
            except ServiceError as error:
                client = scope.get("client")
                audit.warning(
                    "refused: %s",
                    error.reason,
                    extra={"path": scope["path"], "client": client[0] if client else None},
                )
                raise
            scope["gym.call"] = Call(key=key, request_id=identity, deadline=_deadline(headers))
            self._rates.take(key)
        scope["app"] = self  # has the router raise for an unknown path instead of answering in its own form
        body = receive if _streams(scope) else _limited(receive, headers, self._max_request_bytes)
        await self._app(scope, body, send)

    async def _refuse(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        if isinstance(error, HTTPException):
            told = _of_http(error, scope)
        else:
            log_failure(error, scope["path"])
            told = as_service_error(error)
        if told.reason is Reason.ADMIN_REQUIRED:
            audit.warning("refused: %s", told.reason, extra={"path": scope["path"], "key": scope["gym.call"].key.name})
        in_connect = scope["path"].startswith("/gym.v1.")
        response: Response = connect_error_response(told) if in_connect else error_response(told)
        await response(scope, receive, send)


def log_failure(error: Exception, path: str) -> None:
    """Logs what is the daemon's own fault, whole."""
    if as_service_error(error).reason is Reason.INTERNAL:
        logger.error("%s failed", path, exc_info=error)


def _streams(scope: Scope) -> bool:
    """Whether the body is a file, which its handler takes in pieces and limits itself."""
    return scope["method"] == "POST" and (
        scope["path"] == "/v1/files" or re.fullmatch(r"/v1/uploads/[^/]+/parts", scope["path"]) is not None
    )


def _limited(receive: Receive, headers: Headers, limit: int) -> Receive:
    """The body, refused above `limit` bytes: by its announced length at once, else when they have come."""
    announced = headers.get("content-length", "0")
    received = 0

    async def limited() -> Message:
        nonlocal received
        if announced.isdigit() and int(announced) > limit:
            raise _too_large(limit)
        message = await receive()
        if message["type"] == "http.request":
            received += len(message.get("body", b""))
            if received > limit:
                raise _too_large(limit)
        return message

    return limited


def _too_large(limit: int) -> ServiceError:
    return ServiceError(Reason.REQUEST_INVALID, f"the body is larger than {limit} bytes", http_status=413)


def _deadline(headers: Headers) -> float | None:
    text = headers.get("x-request-timeout-s") or headers.get("connect-timeout-ms")
    if text is None:
        return None
    try:
        seconds = float(text) / (1000 if headers.get("x-request-timeout-s") is None else 1)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise ServiceError(Reason.REQUEST_INVALID, f"'{text}' is no timeout", field="x-request-timeout-s")
    return time.monotonic() + seconds


def _of_http(error: HTTPException, scope: Scope) -> ServiceError:
    if error.status_code == 404:
        return ServiceError(
            Reason.REQUEST_INVALID,
            f"unknown path: {scope['method']} {scope['path']}",
            http_status=404,
            openai_code="unknown_url",
        )
    if error.status_code == 405:
        return ServiceError(
            Reason.REQUEST_INVALID,
            f"{scope['path']} does not take {scope['method']}",
            http_status=405,
            openai_code="method_not_allowed",
        )
    return ServiceError(Reason.REQUEST_INVALID, str(error.detail), http_status=error.status_code)
