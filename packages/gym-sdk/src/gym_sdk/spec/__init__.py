"""The run specification: models of every section, loading with helpful errors, the saved and the wire form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gym_sdk.spec._dump import canonical_json, dump_yaml, sha256
    from gym_sdk.spec._load import load_spec, parse_spec, spec_from_data
    from gym_sdk.spec.adapter import FullAdapter, LoraAdapter
    from gym_sdk.spec.data import DataSource, DataSpec, EvalSplit
    from gym_sdk.spec.distillation import Distillation
    from gym_sdk.spec.evaluation import EvaluationSpec, JsonFieldsTask
    from gym_sdk.spec.method import Pretrain, Sft
    from gym_sdk.spec.model import ModelSpec
    from gym_sdk.spec.output import OutputSpec
    from gym_sdk.spec.performance import ParallelSpec, PerformanceSpec
    from gym_sdk.spec.preference import Cpo, Dpo, Kto, Orpo, Simpo, WeightedLoss
    from gym_sdk.spec.rewards import (
        ExactReward,
        JsonReward,
        MathReward,
        NumericReward,
        PluginReward,
        PythonReward,
        RegexReward,
        RewardSpec,
    )
    from gym_sdk.spec.run import SPEC_VERSION, RunSpec
    from gym_sdk.spec.scoring import Classification, Reward
    from gym_sdk.spec.train import TrainSpec
    from gym_sdk.spec.training_free import (
        BudgetSpec,
        CapsSpec,
        EndpointSpec,
        ExperienceReportSpec,
        GateSpec,
        LibrarySpec,
        PriceSpec,
        PruningSpec,
        SamplingSpec,
        TrainingFreeGrpo,
    )

_MODULES = {
    "_dump": ("canonical_json", "dump_yaml", "sha256"),
    "_load": ("load_spec", "parse_spec", "spec_from_data"),
    "adapter": ("FullAdapter", "LoraAdapter"),
    "data": ("DataSource", "DataSpec", "EvalSplit"),
    "distillation": ("Distillation",),
    "evaluation": ("EvaluationSpec", "JsonFieldsTask"),
    "method": ("Pretrain", "Sft"),
    "model": ("ModelSpec",),
    "output": ("OutputSpec",),
    "performance": ("ParallelSpec", "PerformanceSpec"),
    "preference": ("Cpo", "Dpo", "Kto", "Orpo", "Simpo", "WeightedLoss"),
    "rewards": (
        "ExactReward",
        "JsonReward",
        "MathReward",
        "NumericReward",
        "PluginReward",
        "PythonReward",
        "RegexReward",
        "RewardSpec",
    ),
    "run": ("SPEC_VERSION", "RunSpec"),
    "scoring": ("Classification", "Reward"),
    "train": ("TrainSpec",),
    "training_free": (
        "BudgetSpec",
        "CapsSpec",
        "EndpointSpec",
        "ExperienceReportSpec",
        "GateSpec",
        "LibrarySpec",
        "PriceSpec",
        "PruningSpec",
        "SamplingSpec",
        "TrainingFreeGrpo",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "SPEC_VERSION",
    "BudgetSpec",
    "CapsSpec",
    "Classification",
    "Cpo",
    "DataSource",
    "DataSpec",
    "Distillation",
    "Dpo",
    "EndpointSpec",
    "EvalSplit",
    "EvaluationSpec",
    "ExactReward",
    "ExperienceReportSpec",
    "FullAdapter",
    "GateSpec",
    "JsonFieldsTask",
    "JsonReward",
    "Kto",
    "LibrarySpec",
    "LoraAdapter",
    "MathReward",
    "ModelSpec",
    "NumericReward",
    "Orpo",
    "OutputSpec",
    "ParallelSpec",
    "PerformanceSpec",
    "PluginReward",
    "Pretrain",
    "PriceSpec",
    "PruningSpec",
    "PythonReward",
    "RegexReward",
    "Reward",
    "RewardSpec",
    "RunSpec",
    "SamplingSpec",
    "Sft",
    "Simpo",
    "TrainSpec",
    "TrainingFreeGrpo",
    "WeightedLoss",
    "canonical_json",
    "dump_yaml",
    "load_spec",
    "parse_spec",
    "sha256",
    "spec_from_data",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
