"""The JSON of a tokenizer, which has tens of megabytes for a large vocabulary: read and written by orjson."""

from __future__ import annotations

import json
from typing import Any

import orjson


def read_spec(text: str) -> dict[str, Any]:
    """The value of `tokenizer.json`. Raises ValueError."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:  # orjson refuses half a surrogate pair, which some vocabularies hold
        return json.loads(text)


def spec_text(spec: dict[str, Any]) -> str:
    """The JSON text of a tokenizer."""
    try:
        return orjson.dumps(spec).decode()
    except TypeError:  # half a surrogate pair
        return json.dumps(spec, ensure_ascii=False)
