"""Guards `gym explain`, `gym schema` and the reference page: all derive from the specification and stay true to it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import jsonschema
import pytest
from pydantic import ConfigDict, TypeAdapter

from gym_sdk.errors import SpecError, UserError
from gym_sdk.spec import RunSpec, spec_from_data
from gym_sdk.spec._explain import example, explain, explain_tree, field_data, find_fields
from gym_sdk.spec._fields import Field, all_fields
from gym_sdk.spec._overrides import override_value
from gym_sdk.spec._schema import json_schema

REPOSITORY = Path(__file__).resolve().parents[3]
LEAVES = [field for field in all_fields(RunSpec) if not field.children and field.name != "kind"]


def test_a_field_is_explained() -> None:
    assert explain("train.learning_rate") == (
        "train.learning_rate\n"
        "  a number above 0; default 0.0002\n"
        "\n"
        "  The peak rate. 2e-4 suits LoRA; full fine-tuning wants about a tenth of it.\n"
        "\n"
        "  example: train.learning_rate=0.0002"
    )
    assert "  unit: GB (10^9 bytes)\n" in explain("performance.memory_limit_gb")
    assert explain("data.train[0].source") == explain("data.train.source") == explain("data.train[].source")


def test_a_union_lists_its_kinds_and_a_kind_its_fields() -> None:
    text = explain("adapter")
    assert "    lora    Low-rank updates beside frozen weights" in text
    assert "    full    No adapter: every weight is trained." in text
    assert explain("adapter.kind") == text
    lora = explain("adapter.lora")
    assert lora.startswith("adapter kind lora\n")
    assert "a whole number from 1 to 4096; 16" in lora
    assert explain("method.sft").startswith("method kind sft\n")
    assert explain("lora") == lora
    assert explain("adapter.lora.rank") in explain("adapter.rank")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("learning_rate", "did you mean train.learning_rate?"),
        ("train.lerning_rate", "did you mean train.learning_rate"),
        ("train.lr", "it is called train.learning_rate here"),
        ("zzzzz", "`gym explain` lists every field"),
    ],
)
def test_a_wrong_field_names_the_nearest(path: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        explain(path)
    assert (caught.value.hint or "").startswith(hint)


@pytest.mark.parametrize("field", list(all_fields(RunSpec)), ids=lambda field: f"{field.path}-{field.kind}")
def test_every_field_is_documented(field: Field) -> None:
    assert field.doc.endswith(".")
    assert field in find_fields(field.path)
    assert field.name in explain_tree()
    assert field_data(field)["type"] == field.shape.describe()


@pytest.mark.parametrize("field", LEAVES, ids=lambda field: f"{field.path}-{field.kind}")
def test_every_example_is_accepted(field: Field) -> None:
    info = field.owner.model_fields[field.name]
    accepts = TypeAdapter(Annotated[info.annotation, None, *info.metadata], config=ConfigDict(strict=True))  # pyright: ignore
    accepts.validate_python(override_value(example(field), field.shape))


def test_the_schema_says_what_the_specification_says() -> None:
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["data"]
    assert schema["properties"]["seed"] == {
        "default": 0,
        "description": "Fixes the order of rows, adapter initialisation and dropout.",
        "exclusiveMaximum": 4294967296,
        "minimum": 0,
        "title": "Seed",
        "type": "integer",
    }
    described = [
        name
        for definition in schema["$defs"].values()
        for name, each in definition["properties"].items()
        if "description" in each
    ]
    assert {"rank", "learning_rate", "max_length"} <= set(described)


@pytest.mark.parametrize(
    ("given", "valid"),
    [
        ({"model": {"source": "a"}}, True),
        ({}, False),
        ({"method": {"kind": "training_free_grpo", "student": {"model": "a"}}}, True),
        ({"method": {"kind": "training_free_grpo"}}, False),
        ({"method": {"kind": "sft"}}, False),
    ],
)
def test_schema_and_specification_agree_on_who_needs_a_model(given: dict[str, object], valid: bool) -> None:
    data = {"data": {"train": [{"source": "rows.jsonl"}]}, **given}
    assert jsonschema.Draft202012Validator(json_schema()).is_valid(data) == valid
    with nullcontext() if valid else pytest.raises(SpecError):
        spec_from_data(data)


def test_the_reference_page_is_fresh() -> None:
    result = subprocess.run(
        [sys.executable, str(REPOSITORY / "tools/generate_reference.py"), "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
