"""From the specification that a client sent to the one that may run here.

A client names files and models by the ids that the daemon gave them. A path in its specification would be a path of
this machine that the client has no business with, so every field that is marked as one (`FilePath`) is either
translated here or refused; a field that is added to the specification later is refused until it is known here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from gym_sdk.errors import Problem, SpecError, Where
from gym_sdk.spec import RunSpec, TrainingFreeGrpo
from gym_sdk.spec._base import FilePath
from gym_sdk.spec.training_free import EndpointSpec
from gym_serve.jobs.model import Job
from gym_serve.settings import JobSettings

FILE_SCHEME = "file:"
"""`source: file:file-0123` names an uploaded file."""
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_DATA_SOURCE = re.compile(r"^(data|evaluation)\..*source$")
_ADAPTER_BESIDE = re.compile(r"adapter\.beside\[\d+\]\.source")


class ModelLookup(Protocol):
    """What the models of this daemon are, by id."""

    def base_source(self, model_id: str) -> str | None:
        """The source of a base model (or of an adapter's base), named by its id or by that source itself."""
        ...

    def adapter_folder(self, model_id: str) -> str | None:
        """The folder of an adapter."""
        ...

    def experiences_folder(self, model_id: str) -> str | None:
        """The folder of an experience library."""
        ...


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A specification in which every name stands for something that its owner may use."""

    spec: RunSpec
    file_ids: list[str]
    """The uploaded files it reads; their places in `spec` are filled in by `place_files`."""


def admit(spec: RunSpec, models: ModelLookup, settings: JobSettings) -> Admitted:
    """Translates the names of a client's specification. Raises `SpecError` with every field that may not be used."""
    problems: list[Problem] = []
    changes: dict[str, str] = {}
    file_ids: list[str] = []

    def refuse(path: str, message: str, hint: str | None = None) -> None:
        problems.append(Problem(message=message, where=Where(path=path), hint=hint))

    for path, value in _named_paths(spec):
        if _DATA_SOURCE.match(path):
            file_id = value.removeprefix(FILE_SCHEME)
            if not re.fullmatch(r"file-[0-9a-f]{1,64}", file_id):
                refuse(
                    path,
                    f"'{value}' is no file of this daemon",
                    "upload the file first, then name it as file:<id>; gym jobs submit does both",
                )
            else:
                file_ids.append(file_id)
        elif path == "model.source" and spec.method.kind == "training_free_grpo":
            continue  # no weights are read: it is a name that an endpoint knows
        elif path in ("model.source", "method.teacher"):
            source = models.base_source(value)
            if models.experiences_folder(value) is not None:
                refuse(
                    path,
                    f"'{value}' is a library of experiences, which has no weights to start from",
                    "name its base; method.library.initial takes a library",
                )
            elif source is not None:
                changes[path] = source
            elif value not in settings.allowed_models and not (settings.allow_hub_models and _HUB_ID.match(value)):
                refuse(path, f"'{value}' may not be used here", "gym models list shows what this daemon has")
        elif path == "adapter.init_from" or _ADAPTER_BESIDE.fullmatch(path):
            folder = models.adapter_folder(value)
            if folder is None:
                refuse(path, f"'{value}' is no adapter of this daemon", "gym models list shows what this daemon has")
            else:
                changes[path] = folder
        elif path == "method.library.initial":
            folder = models.experiences_folder(value)
            if folder is None:
                refuse(path, f"'{value}' is no library of this daemon", "gym models list shows what this daemon has")
            else:
                changes[path] = folder
        else:
            refuse(path, "a path of this machine cannot be used from a client")
    if spec.model.trust_remote_code and not settings.allow_remote_code:
        refuse("model.trust_remote_code", "the operator of this daemon does not allow code of models")
    if problems:
        raise SpecError.of(tuple(problems), name="spec")
    return Admitted(spec=_replace(spec, changes), file_ids=file_ids)


_FIT_FOR = {
    **dict.fromkeys(("openai", "prompt_completion"), "sft"),
    **dict.fromkeys(("openai_preference", "preference"), "preference"),
    "unpaired": "unpaired",
}
"""Formats whose rows are fit for one kind of method only."""


def check_rows(spec: RunSpec, formats: Mapping[str, str | None]) -> None:
    """Raises `SpecError` where uploaded rows (the format of each file id) cannot train what the method learns from."""
    wanted: str | None = getattr(spec.method, "data_objective", None)
    problems: list[Problem] = []
    for index, source in enumerate(spec.data.train):
        found = formats.get(source.source.removeprefix(FILE_SCHEME))
        fit_for = _FIT_FOR.get(found or "")
        if wanted is None or fit_for is None or source.format != "auto" or fit_for == wanted:
            continue
        if (fit_for, wanted) == ("preference", "unpaired"):
            continue  # a pair is a good answer and a bad one
        message = f"its rows are {_ROWS[fit_for]} ({found}); {spec.method.kind} learns from {_ROWS[wanted]}"
        problems.append(Problem(message=message, where=Where(path=f"data.train[{index}].source"), hint=None))
    if problems:
        raise SpecError.of(tuple(problems), name="spec")


_ROWS = {
    "sft": "prompts with one answer",
    "preference": "pairs of a better and a worse answer",
    "unpaired": "answers with a label",
}


def asks_an_endpoint(job: Job) -> bool:
    """Whether a job's model answers at an endpoint, which may be this daemon."""
    return json.loads(job.spec_json)["method"]["kind"] == "training_free_grpo"


def place_files(spec: RunSpec, place: Callable[[str], str], runs_dir: str, *, own_url: str = "") -> RunSpec:
    """The specification that the trainer gets: files as paths (`place(file id)`), output below the job's folder, and
    `own_url` where it names `gym serve` on this machine by the default address."""
    changes = {
        path: place(value.removeprefix(FILE_SCHEME)) for path, value in _named_paths(spec) if _DATA_SOURCE.match(path)
    }
    changes["output.dir"] = runs_dir
    if own_url and isinstance(spec.method, TrainingFreeGrpo):
        # The client means the daemon that it sends the job to, at whatever port that listens.
        own = re.sub(r"//(0\.0\.0\.0|\[::\])(?=:)", "//127.0.0.1", own_url) + "/v1"
        endpoints = {"student": spec.method.student, "teacher": spec.method.teacher}
        for name, endpoint in endpoints.items():
            if endpoint is not None and endpoint.base_url == EndpointSpec().base_url:
                changes[f"method.{name}.base_url"] = own
    return _replace(spec, changes)


def _named_paths(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every field marked `FilePath` that holds text, as (path, text)."""
    for name, info in type(model).model_fields.items():
        yield from _walk(getattr(model, name), f"{prefix}{name}", _is_path(info.metadata, info.annotation))


def _walk(value: object, path: str, is_path: bool) -> Iterator[tuple[str, str]]:
    if isinstance(value, BaseModel):
        yield from _named_paths(value, f"{path}.")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(item, f"{path}[{index}]", is_path)
    elif isinstance(value, str) and is_path:
        yield path, value


def _is_path(metadata: list[object], annotation: object) -> bool:
    """Whether the marker is on the field itself or anywhere in its type (`Annotated[str, FilePath()] | None`)."""
    if any(isinstance(item, FilePath) for item in metadata):
        return True
    parts = [*getattr(annotation, "__metadata__", ()), *getattr(annotation, "__args__", ())]
    return any(isinstance(part, FilePath) or _is_path([], part) for part in parts)


def _replace(spec: RunSpec, changes: dict[str, str]) -> RunSpec:
    data = spec.model_dump()
    for path, value in changes.items():
        *parents, last = re.findall(r"[^.\[\]]+", path)
        target: Any = data
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target[part]
        target[last] = value
    return RunSpec.model_validate(data)
