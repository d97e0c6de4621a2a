"""`/healthz`, `/readyz` and `/metrics`."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gym_serve.auth import require_admin
from gym_serve.http.gateway import call_of
from gym_serve.logs import audit
from gym_serve.metrics import CONTENT_TYPE, Metrics


def operation_routes(metrics: Metrics, readiness: Callable[[], dict[str, str]]) -> list[Route]:
    """The routes. `readiness` has a word for each part of the daemon; all of them `ok` is ready."""

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> Response:
        parts = readiness()
        ready = all(word == "ok" for word in parts.values())
        return JSONResponse({"status": "ok" if ready else "unavailable", **parts}, status_code=200 if ready else 503)

    async def show_metrics(request: Request) -> Response:
        key = call_of(request).key
        require_admin(key)
        audit.info("metrics read", extra={"by": key.name})
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    return [
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/metrics", show_metrics, methods=["GET"]),
    ]
