"""gym.v1.ModelService."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from pathlib import Path

from gym_data.experience import LIBRARY_FILE
from gym_sdk._proto.gym.v1 import models_pb2 as pb
from gym_sdk.errors import DataError
from gym_serve.auth import require_admin
from gym_serve.call import Call
from gym_serve.catalog import EVERYONE, Catalog, Model, ModelKind
from gym_serve.errors import invalid
from gym_serve.files.service import FileService
from gym_serve.grpc import convert
from gym_serve.jobs.model import JobState
from gym_serve.jobs.results import JobResults
from gym_serve.jobs.service import JobService
from gym_serve.logs import audit
from gym_serve.model_store import check_upload_name
from gym_serve.serving import Presence, Serving

logger: logging.Logger = logging.getLogger(__name__)

_STATES = {
    Presence.AVAILABLE: pb.MODEL_STATE_AVAILABLE,
    Presence.LOADING: pb.MODEL_STATE_LOADING,
    Presence.LOADED: pb.MODEL_STATE_LOADED,
    Presence.FAILED: pb.MODEL_STATE_FAILED,
}


class ModelRpc:
    """Methods by their names in the schema."""

    def __init__(
        self, catalog: Catalog, serving: Serving, files: FileService, jobs: JobService, results: JobResults
    ) -> None:
        self._catalog = catalog
        self._serving = serving
        self._files = files
        self._jobs = jobs
        self._results = results

    async def CreateModel(self, request: pb.CreateModelRequest, call: Call) -> pb.CreateModelResponse:
        """Registers a base, a job's result, or an uploaded adapter or library."""
        match request.WhichOneof("source"):
            case "base":
                require_admin(call.key)
                if not request.base.source:
                    raise invalid("a base has a source", field="base.source")
                model = await self._catalog.add_base(
                    request.base.source, revision=request.base.revision or None, model_id=request.name or None
                )
                audit.info("base added", extra={"by": call.key.name, "model": model.id, "source": model.source})
            case "job":
                model = await self._from_job(request.job, call)
            case "adapter":
                model = await self._from_files(request.adapter, request.name, call)
            case "experiences":
                model = await self._from_library(request.experiences, request.name, call)
            case _:
                raise invalid("one of base, job, adapter and experiences must be given", field="source")
        return pb.CreateModelResponse(model=self._message(model))

    async def GetModel(self, request: pb.GetModelRequest, call: Call) -> pb.GetModelResponse:
        """A model by id or alias."""
        return pb.GetModelResponse(model=self._message(self._catalog.get(call.key, request.model_id)))

    async def ListModels(self, request: pb.ListModelsRequest, call: Call) -> pb.ListModelsResponse:
        """Bases first, then the newest first."""
        filters = {"kind": request.kind, "base": request.base_model_id}
        after, size = convert.read_page(request.page_size, request.page_token, filters)
        found = self._catalog.all(call.key, kind=convert.kind_of(request.kind), base_id=request.base_model_id or None)
        if after is not None:
            ids = [model.id for model in found]
            found = found[ids.index(after) + 1 :] if after in ids else []
        return pb.ListModelsResponse(
            models=[self._message(model) for model in found[:size]],
            next_page_token=convert.next_page_token(found[size - 1].id, filters) if len(found) > size else "",
        )

    async def DeleteModel(self, request: pb.DeleteModelRequest, call: Call) -> pb.DeleteModelResponse:
        """Removes a model."""
        model = await self._catalog.remove(call.key, request.model_id)
        await self._serving.unload(model)
        if model.owner == EVERYONE:
            audit.info("model removed", extra={"by": call.key.name, "model": model.id})
        return pb.DeleteModelResponse()

    async def LoadModel(self, request: pb.LoadModelRequest, call: Call) -> pb.LoadModelResponse:
        """Puts a model into its engine."""
        model = self._catalog.get(call.key, request.model_id)
        if model.kind is ModelKind.BASE:
            require_admin(call.key)
            audit.info("base loaded", extra={"by": call.key.name, "model": model.id})
        await self._serving.load(model)
        return pb.LoadModelResponse(model=self._message(model))

    async def UnloadModel(self, request: pb.UnloadModelRequest, call: Call) -> pb.UnloadModelResponse:
        """Takes a model out of its engine."""
        model = self._catalog.get(call.key, request.model_id)
        if model.owner == EVERYONE:
            require_admin(call.key)
            audit.info("model unloaded", extra={"by": call.key.name, "model": model.id})
        await self._serving.unload(model)
        return pb.UnloadModelResponse(model=self._message(model))

    async def SetModelAlias(self, request: pb.SetModelAliasRequest, call: Call) -> pb.SetModelAliasResponse:
        """Lets a name mean a model."""
        model = await self._catalog.set_alias(call.key, request.alias, request.model_id)
        return pb.SetModelAliasResponse(model=self._message(model))

    async def DeleteModelAlias(self, request: pb.DeleteModelAliasRequest, call: Call) -> pb.DeleteModelAliasResponse:
        """Forgets a name."""
        await self._catalog.remove_alias(call.key, request.alias)
        return pb.DeleteModelAliasResponse()

    async def _from_job(self, source: pb.JobSource, call: Call) -> Model:
        job = await self._jobs.get(call.key, source.job_id)
        if not source.checkpoint_id:
            if job.state is not JobState.SUCCEEDED or job.model_id is None:
                raise invalid(f"job '{job.id}' is {job.state} and has made no model", field="job.job_id")
            return self._catalog.get(call.key, job.model_id)
        for checkpoint in await self._jobs.checkpoints(call.key, job.id):
            if str(checkpoint.step) == source.checkpoint_id:
                return await self._results.register_checkpoint(job, checkpoint.step, checkpoint.path)
        raise invalid(f"job '{job.id}' has no checkpoint '{source.checkpoint_id}'", field="job.checkpoint_id")

    async def _from_files(self, source: pb.AdapterSource, name: str, call: Call) -> Model:
        base = self._catalog.get(call.key, source.base_model_id)
        if base.kind is not ModelKind.BASE:
            raise invalid(f"'{base.id}' is no base model", field="adapter.base_model_id")
        check_upload_name(file.name for file in source.files)
        files = [(file.name, await self._files.file(call.key, file.file_id)) for file in source.files]
        with tempfile.TemporaryDirectory() as folder:
            for file_name, file in files:
                await asyncio.to_thread(self._files.place, file, Path(folder) / file_name)
            model = await self._catalog.add_adapter(
                Path(folder), base, model_id=self._catalog.free_id(name or f"{base.id}-adapter"), owner=call.key.id
            )
        try:
            await self._serving.load_beside(model)
        except BaseException:
            await self._catalog.discard(model)
            raise
        return model

    async def _from_library(self, source: pb.ExperiencesSource, name: str, call: Call) -> Model:
        carrier = self._catalog.get(call.key, source.base_model_id)
        file = await self._files.file(call.key, source.file_id)
        with tempfile.TemporaryDirectory() as folder:
            await asyncio.to_thread(self._files.place, file, Path(folder) / LIBRARY_FILE)
            try:
                return await self._catalog.add_experiences(
                    Path(folder),
                    carrier,
                    model_id=self._catalog.free_id(name or f"{self._catalog.base_of(carrier).id}-experiences"),
                    owner=call.key.id,
                )
            except DataError as error:
                line = f"{file.filename}:{error.where.line}" if error.where and error.where.line else file.filename
                raise invalid(f"{line}: {error.message}", field="experiences.file_id", hint=error.hint) from None

    def _message(self, model: Model) -> pb.Model:
        presence, message = self._serving.presence(model)
        return convert.model_message(model, _STATES[presence], message, self._serving.context_length(model))
