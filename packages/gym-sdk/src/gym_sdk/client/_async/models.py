"""Models: listed, registered, named, loaded and unloaded."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence

from gym_sdk._proto.gym.v1 import models_pb2 as pb
from gym_sdk.client import _convert
from gym_sdk.client._async.caller import AsyncCaller
from gym_sdk.client._async.pages import all_pages
from gym_sdk.client.types import ModelInfo, ModelKind

LOAD_TIMEOUT_S = 1800.0
"""A large base takes minutes to read from a disk."""


class AsyncModels:
    """The models of a daemon."""

    def __init__(self, caller: AsyncCaller) -> None:
        self._caller = caller

    async def get(self, model_id: str) -> ModelInfo:
        """One model, by id or alias."""
        request = pb.GetModelRequest(model_id=model_id)
        answer = await self._caller.unary("ModelService/GetModel", request, pb.GetModelResponse)
        return _convert.model_info(answer.model)

    async def list(
        self, *, kind: ModelKind | str | None = None, base_model_id: str = "", limit: int | None = None
    ) -> AsyncIterator[ModelInfo]:
        """Models: bases first, then newest first."""

        async def fetch(token: str) -> tuple[Sequence[pb.Model], str]:
            request = pb.ListModelsRequest(
                page_token=token, kind=_convert.model_kind(kind), base_model_id=base_model_id
            )
            page = await self._caller.unary("ModelService/ListModels", request, pb.ListModelsResponse)
            return page.models, page.next_page_token

        async for model in all_pages(fetch, limit):
            yield _convert.model_info(model)

    async def create_base(self, source: str, *, revision: str = "", name: str = "") -> ModelInfo:
        """Register a base model: a hub id or `package:module/file.gguf`. Needs an admin key."""
        base = pb.BaseSource(source=source, revision=revision)
        return await self._create(pb.CreateModelRequest(name=name, base=base))

    async def create_from_job(self, job_id: str, *, checkpoint_id: str = "", name: str = "") -> ModelInfo:
        """Register what a job has made, or one of its checkpoints."""
        job = pb.JobSource(job_id=job_id, checkpoint_id=checkpoint_id)
        return await self._create(pb.CreateModelRequest(name=name, job=job))

    async def create_adapter(self, base_model_id: str, files: Mapping[str, str], *, name: str = "") -> ModelInfo:
        """Register an adapter whose files were uploaded with the purpose `adapter`: ids by plain file name."""
        adapter = pb.AdapterSource(
            base_model_id=base_model_id,
            files=[pb.AdapterFile(name=file_name, file_id=file_id) for file_name, file_id in files.items()],
        )
        return await self._create(pb.CreateModelRequest(name=name, adapter=adapter))

    async def create_experiences(self, base_model_id: str, file_id: str, *, name: str = "") -> ModelInfo:
        """Register a library of experiences in front of a base or an adapter. Its `library.yaml` was uploaded with the
        purpose `adapter`."""
        experiences = pb.ExperiencesSource(base_model_id=base_model_id, file_id=file_id)
        return await self._create(pb.CreateModelRequest(name=name, experiences=experiences))

    async def _create(self, request: pb.CreateModelRequest) -> ModelInfo:
        request.request_id = uuid.uuid4().hex
        answer = await self._caller.unary(
            "ModelService/CreateModel", request, pb.CreateModelResponse, timeout_s=LOAD_TIMEOUT_S
        )
        return _convert.model_info(answer.model)

    async def load(self, model_id: str, *, timeout_s: float | None = LOAD_TIMEOUT_S) -> ModelInfo:
        """Put a model into the engine; returns when it answers."""
        request = pb.LoadModelRequest(model_id=model_id)
        answer = await self._caller.unary("ModelService/LoadModel", request, pb.LoadModelResponse, timeout_s=timeout_s)
        return _convert.model_info(answer.model)

    async def unload(self, model_id: str, *, timeout_s: float | None = None) -> ModelInfo:
        """Take a model out of the engine once its running requests have ended."""
        request = pb.UnloadModelRequest(model_id=model_id)
        answer = await self._caller.unary(
            "ModelService/UnloadModel", request, pb.UnloadModelResponse, timeout_s=timeout_s
        )
        return _convert.model_info(answer.model)

    async def delete(self, model_id: str) -> None:
        """Unload a model and delete its files."""
        await self._caller.unary(
            "ModelService/DeleteModel", pb.DeleteModelRequest(model_id=model_id), pb.DeleteModelResponse
        )

    async def set_alias(self, alias: str, model_id: str) -> ModelInfo:
        """Let a name mean a model; an alias that exists is moved, in one step."""
        request = pb.SetModelAliasRequest(model_id=model_id, alias=alias)
        answer = await self._caller.unary("ModelService/SetModelAlias", request, pb.SetModelAliasResponse)
        return _convert.model_info(answer.model)

    async def delete_alias(self, alias: str) -> None:
        """Let a name mean nothing."""
        await self._caller.unary(
            "ModelService/DeleteModelAlias", pb.DeleteModelAliasRequest(alias=alias), pb.DeleteModelAliasResponse
        )
