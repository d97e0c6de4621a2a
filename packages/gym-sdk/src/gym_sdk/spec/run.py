"""The run specification: the one definition from which the command, schema, help and validation derive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from gym_sdk.spec._base import SpecModel
from gym_sdk.spec._conflicts import find_conflicts
from gym_sdk.spec.adapter import AdapterSpec, LoraAdapter
from gym_sdk.spec.data import DataSpec
from gym_sdk.spec.evaluation import EvaluationSpec
from gym_sdk.spec.method import MethodSpec, Sft
from gym_sdk.spec.model import ModelSpec
from gym_sdk.spec.output import OutputSpec
from gym_sdk.spec.performance import ParallelSpec, PerformanceSpec
from gym_sdk.spec.train import TrainSpec
from gym_sdk.spec.training_free import student_model_of

SPEC_VERSION = 1


class RunSpec(SpecModel):
    """One run, from data to artifact."""

    spec_version: Literal[1] = SPEC_VERSION
    """The version of this schema."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = "run"
    """A short name; the run's folder is `<name>-<id>`. Letters, digits, dot, dash and underscore."""

    model: ModelSpec
    """The base model. `training_free_grpo` may leave it out: what is improved is `method.student.model`, and
    `model.source` is only what `gym serve RUN` loads behind the library."""

    adapter: AdapterSpec = LoraAdapter()
    """Which weights are trained."""

    method: MethodSpec = Sft()
    """What is optimised."""

    data: DataSpec
    """Rows and masks."""

    train: TrainSpec = TrainSpec()
    """Optimisation."""

    evaluation: EvaluationSpec = EvaluationSpec()
    """Before-and-after measurements."""

    parallel: ParallelSpec = ParallelSpec()
    """How the work is spread."""

    performance: PerformanceSpec = PerformanceSpec()
    """Speed and memory."""

    output: OutputSpec = OutputSpec()
    """Where results go."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Fixes the order of rows, adapter initialisation and dropout."""

    @property
    def batch_rows(self) -> int:
        """Rows in one optimizer step, however the batch is given."""
        tokens = self.train.batch_tokens
        return self.train.batch_size if tokens is None else tokens // self.data.max_length

    @model_validator(mode="before")
    @classmethod
    def _name_the_endpoints_model(cls, data: Any) -> Any:
        """Without a model of its own, a run behind an endpoint is of the model that the endpoint knows."""
        if isinstance(data, Mapping) and "model" not in data and (name := student_model_of(data)):
            return {**data, "model": {"source": name}}
        return data

    @model_validator(mode="after")
    def _no_conflicts(self) -> Self:
        if conflicts := find_conflicts(self):
            text = "; ".join(f"{path}: {reason}" for path, reason in conflicts)
            raise PydanticCustomError("conflict", "{text}", {"text": text, "conflicts": conflicts})
        return self
