"""Guards answers that are held to a schema or grammar, by a real model that knows nothing of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gym_data.record import text_message
from gym_serve.engines.base import RequestRefused
from gym_serve.engines.transformers import TransformersEngine
from gym_serve.inference import ChatModel, ChatRequest, ResponseFormat
from gym_serve.models import load_model, resolve

SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["elephant", "lion"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "seen": {"type": "boolean"},
    },
    "required": ["animal", "count", "seen"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def served(smollm2_folder: Path):
    model = load_model(resolve(str(smollm2_folder)))
    with TransformersEngine(model, tokenizer_json=smollm2_folder / "tokenizer.json") as engine:
        yield ChatModel(engine, smollm2_folder)


def ask(form: ResponseFormat, **settings) -> ChatRequest:
    messages = (text_message("user", "We saw seven elephants by the river."),)
    return ChatRequest(messages=messages, response_format=form, max_tokens=60, **settings)


def text_of(answer) -> str:
    return "".join(delta.text for delta in answer)


def test_answers_satisfy_the_schema_beside_free_ones(served: ChatModel) -> None:
    form = ResponseFormat(kind="json_schema", schema_json=json.dumps(SCHEMA))
    held = [served.chat(ask(form, sampling={"seed": seed, "temperature": 1.5})) for seed in range(3)]
    free = served.chat(ask(ResponseFormat(), sampling={"temperature": 0.0}, stop=(".",)))
    for answer in held:
        deltas = list(answer)
        record = json.loads("".join(delta.text for delta in deltas))
        assert record.keys() == {"animal", "count", "seen"}
        assert record["animal"] in ("elephant", "lion")
        assert type(record["count"]) is int
        assert 0 <= record["count"] <= 99
        assert type(record["seen"]) is bool
        assert deltas[-1].finish_reason == "stop"
    assert not text_of(free).startswith("{")


def test_a_grammar_that_can_end_in_one_way_ends(served: ChatModel) -> None:
    form = ResponseFormat(kind="lark", lark='start: "yes" | "no"')
    assert text_of(served.chat(ask(form))) in ("yes", "no")


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (ResponseFormat(kind="json_schema", schema_json='{"type": "nonsense"}'), "cannot be held"),
        (ResponseFormat(kind="json_schema", schema_json='{"type": '), "not JSON"),
        (ResponseFormat(kind="lark", lark="start: ("), "cannot be held"),
    ],
)
def test_a_grammar_that_cannot_be_held_is_refused_at_once(served: ChatModel, form: ResponseFormat, says: str) -> None:
    with pytest.raises(RequestRefused, match=says):
        served.chat(ask(form))
