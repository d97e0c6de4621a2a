"""OpenAI's `/v1/models`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gym_serve.catalog import EVERYONE, Catalog, Model
from gym_serve.http.gateway import call_of
from gym_serve.logs import audit
from gym_serve.serving import Serving


def model_object(model: Model, name: str | None = None) -> dict[str, object]:
    """OpenAI's `model`; `root` and `parent` say what an adapter is made of."""
    return {
        "id": name or model.id,
        "object": "model",
        "created": int(model.created_at),
        "owned_by": model.owner or "gym",
        "root": model.id,
        "parent": model.base_id,
    }


def model_routes(catalog: Catalog, serving: Serving) -> list[Route]:
    """The routes."""

    async def list_(request: Request) -> Response:
        data: list[dict[str, object]] = []
        for model in catalog.all(call_of(request).key):
            data += [model_object(model), *(model_object(model, alias) for alias in model.aliases)]
        return JSONResponse({"object": "list", "data": data})

    async def retrieve(request: Request) -> Response:
        name = request.path_params["model_id"]
        return JSONResponse(model_object(catalog.get(call_of(request).key, name), name))

    async def delete(request: Request) -> Response:
        key, name = call_of(request).key, request.path_params["model_id"]
        model = await catalog.remove(key, name)
        await serving.unload(model)
        if model.owner == EVERYONE:
            audit.info("model removed", extra={"by": key.name, "model": model.id})
        return JSONResponse({"id": name, "object": "model", "deleted": True})

    return [
        Route("/v1/models", list_, methods=["GET"]),
        Route("/v1/models/{model_id:path}", retrieve, methods=["GET"]),
        Route("/v1/models/{model_id:path}", delete, methods=["DELETE"]),
    ]
