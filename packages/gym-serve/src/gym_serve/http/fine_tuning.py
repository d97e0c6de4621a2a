"""OpenAI's `/v1/fine_tuning/jobs`, on Gym's jobs.

What differs from OpenAI's: hyperparameters that are `auto` are said as the numbers they become; a job can be retried by
`resume` after it failed or was cancelled; `reinforcement` is refused; integrations are refused (a run's own
`output.report_to` does that).
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gym_sdk._proto.gym.v1.events_pb2 import LogLevel, MetricValue, NonFinite, RunEvent, RunState
from gym_sdk._proto.gym.v1.jobs_pb2 import JobProgress
from gym_sdk.spec import RunSpec, parse_spec
from gym_sdk.spec._fields import field_shape
from gym_serve.auth import Key
from gym_serve.catalog import Catalog, ModelKind
from gym_serve.errors import Reason, ServiceError, invalid
from gym_serve.http.errors import read_body
from gym_serve.http.files import page, query_number
from gym_serve.http.gateway import call_of
from gym_serve.jobs.model import FINAL, Checkpoint, Job, JobEvent, JobState, checkpoint_name
from gym_serve.jobs.service import JobService

ORGANIZATION = "gym"
_RESEND_S = 600.0
_AUTO_EPOCHS = 3
_AUTO_BETA = 0.1
_STATUS = {
    JobState.QUEUED: "queued",
    JobState.STARTING: "running",
    JobState.RUNNING: "running",
    JobState.PAUSING: "running",
    JobState.PAUSED: "paused",
    JobState.CANCELLING: "running",
    JobState.CANCELLED: "cancelled",
    JobState.FAILED: "failed",
    JobState.SUCCEEDED: "succeeded",
}
_SENTENCES = {
    JobState.QUEUED: "Job enqueued. Waiting for jobs ahead to complete.",
    JobState.STARTING: "The job's processes are started.",
    JobState.RUNNING: "Fine-tuning job started",
    JobState.PAUSING: "The job is asked to pause.",
    JobState.PAUSED: "The job is paused.",
    JobState.CANCELLING: "The job is asked to stop.",
    JobState.CANCELLED: "The job was cancelled.",
    JobState.FAILED: "The job failed.",
    JobState.SUCCEEDED: "The job has successfully completed",
}


class _Body(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


class Hyperparameters(_Body):
    """Of both methods; `beta` is of dpo."""

    batch_size: Literal["auto"] | Annotated[int, Field(ge=1, le=100_000)] = "auto"
    learning_rate_multiplier: Literal["auto"] | Annotated[float, Field(gt=0, le=1e6)] = "auto"
    n_epochs: Literal["auto"] | Annotated[int, Field(ge=1, le=10_000)] = "auto"
    beta: Literal["auto"] | Annotated[float, Field(gt=0, le=1e6)] = "auto"


class MethodOptions(_Body):
    """`supervised` or `dpo`."""

    hyperparameters: Hyperparameters = Hyperparameters()


class Method(_Body):
    """How to train."""

    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: MethodOptions | None = None
    dpo: MethodOptions | None = None
    reinforcement: dict[str, Any] | None = None


class CreateJob(BaseModel):
    """`POST /v1/fine_tuning/jobs`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    model: Annotated[str, Field(min_length=1, max_length=500)]
    training_file: Annotated[str, Field(min_length=1, max_length=200)]
    validation_file: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    hyperparameters: Hyperparameters | None = None
    method: Method | None = None
    suffix: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    integrations: list[dict[str, Any]] | None = None
    metadata: dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]] | None = (
        None
    )


def fine_tuning_routes(jobs: JobService, catalog: Catalog) -> list[Route]:
    """The routes."""

    async def create(request: Request) -> Response:
        key = call_of(request).key
        digest = hashlib.sha256(await request.body()).hexdigest()
        if request.headers.get("x-stainless-retry-count", "0") != "0":
            # The official client sends a request again when it was not answered, and gives it no id of its own.
            for job in await jobs.list(key, limit=20):
                if job.origin.get("body_sha256") == digest and time.time() - job.created_at < _RESEND_S:
                    return JSONResponse(job_object(job))
        body = await read_body(request, CreateJob)
        origin, spec = _to_spec(body, key, catalog)
        job = await jobs.create(key, json.dumps(spec), labels=body.metadata, origin={**origin, "body_sha256": digest})
        return JSONResponse(job_object(job))

    async def list_(request: Request) -> Response:
        limit = query_number(request, "limit", 20, 1, 100)
        metadata = {
            match.group(1): value
            for name, value in request.query_params.multi_items()
            if (match := re.fullmatch(r"metadata\[(.{1,64})\]", name))
        }
        found = await jobs.list(
            call_of(request).key, labels=metadata, after=request.query_params.get("after"), limit=limit + 1
        )
        return JSONResponse(page([job_object(job) for job in found], limit))

    async def retrieve(request: Request) -> Response:
        return JSONResponse(job_object(await jobs.get(call_of(request).key, request.path_params["job_id"])))

    async def cancel(request: Request) -> Response:
        return JSONResponse(job_object(await jobs.cancel(call_of(request).key, request.path_params["job_id"])))

    async def pause(request: Request) -> Response:
        return JSONResponse(job_object(await jobs.pause(call_of(request).key, request.path_params["job_id"])))

    async def resume(request: Request) -> Response:
        return JSONResponse(job_object(await jobs.resume(call_of(request).key, request.path_params["job_id"])))

    async def events(request: Request) -> Response:
        key, job_id = call_of(request).key, request.path_params["job_id"]
        limit = query_number(request, "limit", 20, 1, 100)
        before = _sequence_of(request.query_params.get("after"), "event", job_id)
        found = await jobs.latest_events(key, job_id, before=before, limit=limit + 1)
        return JSONResponse(page([event_object(job_id, event) for event in found], limit))

    async def checkpoints(request: Request) -> Response:
        key, job_id = call_of(request).key, request.path_params["job_id"]
        limit = query_number(request, "limit", 10, 1, 100)
        before = _sequence_of(request.query_params.get("after"), "checkpoint", job_id)
        job = await jobs.get(key, job_id)
        found = [
            checkpoint_object(job, checkpoint)
            for checkpoint in await jobs.checkpoints(key, job_id)
            if before is None or checkpoint.step < before
        ]
        return JSONResponse(page(found[: limit + 1], limit))

    base = "/v1/fine_tuning/jobs"
    return [
        Route(base, create, methods=["POST"]),
        Route(base, list_, methods=["GET"]),
        Route(base + "/{job_id}", retrieve, methods=["GET"]),
        Route(base + "/{job_id}/cancel", cancel, methods=["POST"]),
        Route(base + "/{job_id}/pause", pause, methods=["POST"]),
        Route(base + "/{job_id}/resume", resume, methods=["POST"]),
        Route(base + "/{job_id}/events", events, methods=["GET"]),
        Route(base + "/{job_id}/checkpoints", checkpoints, methods=["GET"]),
    ]


def job_object(job: Job) -> dict[str, object]:
    """OpenAI's `fine_tuning.job`."""
    spec: dict[str, Any] = json.loads(job.spec_json)
    progress = JobProgress.FromString(job.progress)
    origin = job.origin
    hyperparameters = origin.get("hyperparameters") or {
        "n_epochs": spec["train"]["epochs"],
        "batch_size": spec["train"]["batch_size"],
        "learning_rate_multiplier": spec["train"]["learning_rate"] / _default_learning_rate(),
    }
    method = str(origin.get("method") or ("dpo" if spec["method"]["kind"] == "dpo" else "supervised"))
    error = None
    if job.failure is not None:
        lines = "\n".join(job.failure.log_lines)
        error = {"code": "job_failed", "message": f"{job.failure.message}\n{lines}".strip(), "param": None}
    running = job.state in (JobState.STARTING, JobState.RUNNING)
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": int(job.created_at),
        "error": error,
        "estimated_finish": int(time.time() + progress.eta_s) if running and progress.HasField("eta_s") else None,
        "fine_tuned_model": job.model_id,
        "finished_at": int(job.finished_at) if job.finished_at else None,
        "hyperparameters": hyperparameters,
        "integrations": [],
        "metadata": job.labels or None,
        "method": {"type": method, method: {"hyperparameters": hyperparameters}},
        "model": origin.get("model") or spec["model"]["source"],
        "organization_id": ORGANIZATION,
        "result_files": [artifact.file_id for artifact in job.artifacts if artifact.kind != "adapter"],
        "seed": spec["seed"],
        "status": _STATUS[job.state],
        "trained_tokens": job.num_tokens if job.state in FINAL else None,
        "training_file": origin.get("training_file") or _file_of(spec["data"]["train"][0]["source"]),
        "validation_file": origin.get("validation_file"),
        "user_provided_suffix": origin.get("suffix"),
    }


def checkpoint_object(job: Job, checkpoint: Checkpoint) -> dict[str, object]:
    """OpenAI's `fine_tuning.job.checkpoint`."""
    progress = JobProgress.FromString(checkpoint.progress)
    values = {name: _number(value) for name, value in progress.metrics.items()}
    return {
        "id": f"ftckpt-{job.id}-{checkpoint.step}",
        "object": "fine_tuning.job.checkpoint",
        "created_at": int(checkpoint.created_at),
        "fine_tuned_model_checkpoint": checkpoint_name(job, checkpoint.step),
        "fine_tuning_job_id": job.id,
        "metrics": {"step": checkpoint.step, **_openai_metrics(values)},
        "step_number": checkpoint.step,
    }


def event_object(job_id: str, event: JobEvent) -> dict[str, object]:
    """OpenAI's `fine_tuning.job.event`."""
    level, message, kind, data = "info", "", "message", {}
    if event.state is not None:
        message = f"{_SENTENCES[event.state]} {event.message}".strip()
        level = "error" if event.state is JobState.FAILED else "info"
    elif event.run is not None:
        run = RunEvent.FromString(event.run)
        match run.WhichOneof("event"):
            case "metric":
                values = {name: _number(value) for name, value in run.metric.values.items()}
                kind, data = "metrics", {"step": run.metric.step, **_openai_metrics(values), **values}
                loss = f": training loss={values['loss']:.4f}" if isinstance(values.get("loss"), float) else ""
                message = f"Step {run.metric.step}{loss}"
            case "progress":
                of = f"/{run.progress.total:g}" if run.progress.HasField("total") else ""
                message = f"{run.progress.stage}: {run.progress.done:g}{of} {run.progress.unit}"
            case "log":
                message = run.log.text
                level = {LogLevel.LOG_LEVEL_WARNING: "warn", LogLevel.LOG_LEVEL_ERROR: "error"}.get(
                    run.log.level, "info"
                )
            case "checkpoint":
                message = f"Checkpoint created at step {run.checkpoint.step}"
            case "artifact":
                message = f"Result file created: {run.artifact.path}"
            case "state":
                name = RunState.Name(run.state.state).removeprefix("RUN_STATE_").lower()
                message = f"The run is {name}. {run.state.message}".strip()
            case _:
                message = "An event that this version does not know"
    return {
        "id": f"ftevent-{job_id}-{event.sequence}",
        "object": "fine_tuning.job.event",
        "created_at": int(event.time),
        "level": level,
        "message": message,
        "type": kind,
        "data": data,
    }


def _to_spec(body: CreateJob, key: Key, catalog: Catalog) -> tuple[dict[str, object], dict[str, object]]:
    """What is given back later, and the run specification."""
    method = body.method or Method(type="supervised")
    if method.type == "reinforcement":
        raise _unsupported("reinforcement fine-tuning is not offered here; supervised and dpo are", "method.type")
    if method.type == "dpo" and "dpo" not in field_shape(RunSpec.model_fields["method"]).kinds:
        raise _unsupported("dpo is not offered by this version; supervised is", "method.type")
    if body.integrations:
        raise _unsupported("integrations are not offered here; a run's own output.report_to is", "integrations")
    options = method.dpo if method.type == "dpo" else method.supervised
    given = options.hyperparameters if options else body.hyperparameters or Hyperparameters()
    defaults = RunSpec.model_fields["train"].default
    epochs = _AUTO_EPOCHS if given.n_epochs == "auto" else given.n_epochs
    batch_size = defaults.batch_size if given.batch_size == "auto" else given.batch_size
    multiplier = 1.0 if given.learning_rate_multiplier == "auto" else given.learning_rate_multiplier
    beta = _AUTO_BETA if given.beta == "auto" else given.beta
    seed = body.seed if body.seed is not None else secrets.randbelow(2**31)
    hyperparameters: dict[str, object] = {
        "n_epochs": epochs,
        "batch_size": batch_size,
        "learning_rate_multiplier": multiplier,
        **({"beta": beta} if method.type == "dpo" else {}),
    }
    data: dict[str, object] = {"train": [{"source": f"file:{body.training_file}"}]}
    if body.validation_file is not None:
        data["eval"] = {"sources": [{"source": f"file:{body.validation_file}"}]}
    spec: dict[str, object] = {
        "name": re.sub(r"[^A-Za-z0-9._-]+", "-", body.suffix or "").strip("-._")[:63] or "fine-tune",
        "model": {"source": body.model},
        "method": {"kind": "dpo", "beta": beta} if method.type == "dpo" else {"kind": "sft"},
        "data": data,
        "train": {
            "epochs": float(epochs),
            "batch_size": batch_size,
            "learning_rate": _default_learning_rate() * multiplier,
        },
        "seed": seed,
    }
    if catalog.adapter_folder(body.model) is not None and catalog.get(key, body.model).kind is ModelKind.ADAPTER:
        spec["adapter"] = {"init_from": body.model}
    parse_spec(json.dumps(spec))
    origin: dict[str, object] = {
        "model": body.model,
        "training_file": body.training_file,
        "validation_file": body.validation_file,
        "suffix": body.suffix,
        "method": method.type,
        "hyperparameters": hyperparameters,
    }
    return origin, spec


def _unsupported(message: str, field: str) -> ServiceError:
    return ServiceError(Reason.REQUEST_INVALID, message, field=field, openai_code="unsupported_value")


def _default_learning_rate() -> float:
    return RunSpec.model_fields["train"].default.learning_rate


def _file_of(source: str) -> str:
    return source.removeprefix("file:")


def _sequence_of(item_id: str | None, kind: str, job_id: str) -> int | None:
    """The number in the id of an event or a checkpoint of this job."""
    if item_id is None:
        return None
    prefix = {"event": "ftevent", "checkpoint": "ftckpt"}[kind]
    match = re.fullmatch(rf"{prefix}-{re.escape(job_id)}-(\d{{1,12}})", item_id)
    if match is None:
        raise invalid(f"'{item_id}' is no {kind} of this job", field="after")
    return int(match.group(1))


def _number(value: MetricValue) -> float | str:
    """A metric for JSON, which has no NaN."""
    if value.WhichOneof("value") == "number":
        return value.number
    return NonFinite.Name(value.non_finite).removeprefix("NON_FINITE_").lower()


def _openai_metrics(values: dict[str, float | str]) -> dict[str, float]:
    """The names that OpenAI gives to what was measured."""
    names = {
        "loss": "train_loss",
        "token_accuracy": "train_mean_token_accuracy",
        "eval_loss": "full_valid_loss",
        "eval_token_accuracy": "full_valid_mean_token_accuracy",
    }
    return {names[name]: value for name, value in values.items() if name in names and isinstance(value, float)}
