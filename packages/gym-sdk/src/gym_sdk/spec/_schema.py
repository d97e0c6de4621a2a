"""JSON Schema of the run specification, for editors and for programs in other languages."""

from __future__ import annotations

from typing import Any

from gym_sdk.spec.run import RunSpec


def json_schema() -> dict[str, Any]:
    """The specification as JSON Schema, draft 2020-12, with each field's documentation."""
    schema = RunSpec.model_json_schema()
    # Only a run behind an endpoint may leave the model out, and names it there.
    schema["required"] = [name for name in schema["required"] if name != "model"]
    endpoint: dict[str, Any] = {"student": {"required": ["model"]}, "kind": {"const": "training_free_grpo"}}
    named = {"properties": {"method": {"properties": endpoint, "required": list(endpoint)}}, "required": ["method"]}
    schema["anyOf"] = [{"required": ["model"]}, named]
    # A section that has a `kind` of its own default may leave it out, so no branch of a union requires it.
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Gym run specification",
    }
