"""Guards what a specification changes in a chat: which turns are trained, think blocks, system turns, the date."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from template_families import FAMILIES

from gym_data import ChatRenderer, Prepared, Tokenizer, prepare
from gym_data.record import text_message
from gym_data.rendering.template import clock_readings
from gym_sdk.errors import DataError
from gym_sdk.spec.data import DataSource, DataSpec

SAID = [
    ("system", {"content": "Be brief."}),
    ("user", {"content": "1+1?"}),
    ("assistant", {"content": "two", "reasoning_content": "one and one"}),
    ("user", {"content": "2+2?"}),
    ("assistant", {"content": "four", "reasoning_content": "two and two"}),
]
ROW = {"messages": [{"role": role, **said} for role, said in SAID]}


def write(path: Path, *rows: dict[str, Any]) -> DataSource:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSource(source=str(path))


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small tokenizer and Qwen 3's template, which writes reasoning of the last turn only."""
    folder = tmp_path_factory.mktemp("qwen3")
    family = FAMILIES["qwen3"]
    (folder / "tokenizer.json").write_text(family.backend().to_str())
    (folder / "chat_template.jinja").write_text(family.source())
    (folder / "tokenizer_config.json").write_text(json.dumps(family.named_tokens()))
    return folder


def rendered(folder: Path, tmp_path: Path, **options: Any) -> tuple[str, list[str], Prepared]:
    """The text of the row, its trained stretches, and the preparation."""
    data = DataSpec(train=[write(tmp_path / "r.jsonl", ROW)], **options)
    prepared = prepare(data, folder, cache_dir=tmp_path, seed=0)
    tokenizer = Tokenizer.from_folder(folder)
    (sample,) = prepared.report.samples
    assert "".join(token.text for token in sample.tokens) == tokenizer.decode(prepared.train[0].ids)
    return tokenizer.decode(prepared.train[0].ids), [t.text for t in sample.tokens if t.trained], prepared


FIRST, LAST = "<think>\n\n</think>\n\n", "<think>\ntwo and two\n</think>\n\n"


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({}, ["two<|im_end|>", f"{LAST}four<|im_end|>"]),
        ({"train_on": "last"}, [f"{LAST}four<|im_end|>"]),
        ({"train_on": "completion"}, [f"{LAST}four<|im_end|>"]),
        ({"thinking": "drop"}, ["two<|im_end|>", f"{FIRST}four<|im_end|>"]),
    ],
    ids=["all", "last", "completion", "thinking dropped"],
)
def test_think_blocks_are_the_templates_or_dropped_and_exactly_the_turns_asked_for_are_trained(
    qwen3_folder: Path, tmp_path: Path, options: dict[str, Any], trained: list[str]
) -> None:
    text, found, prepared = rendered(qwen3_folder, tmp_path, **options)
    assert found == trained
    assert "one and one" not in text
    left_out = prepared.report.left_out
    if "thinking" in options:
        assert not left_out
        assert "two and two" not in text
    else:
        assert left_out["reasoning"].lines == [f"{tmp_path}/r.jsonl:1"]
        assert "the chat template writes no reasoning in 1 rows" in prepared.report.summary()


@pytest.mark.parametrize(
    ("policy", "start"),
    [
        ("template", "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"),
        ("merge", "<|im_start|>user\nBe brief.\n\n1+1?<|im_end|>\n"),
        ("drop", "<|im_start|>user\n1+1?<|im_end|>\n"),
    ],
)
def test_a_system_turn_is_kept_merged_or_dropped(qwen3_folder: Path, tmp_path: Path, policy: str, start: str) -> None:
    text, trained, _ = rendered(qwen3_folder, tmp_path, system=policy)
    assert text.startswith(start)
    assert trained == ["two<|im_end|>", f"{LAST}four<|im_end|>"]


def test_a_system_turn_without_a_user_to_merge_with_is_refused(qwen3_folder: Path, tmp_path: Path) -> None:
    row = {"messages": [ROW["messages"][0], ROW["messages"][2]]}
    data = DataSpec(train=[write(tmp_path / "r.jsonl", row)], system="merge")
    with pytest.raises(DataError, match=r"r.jsonl:1: there is no user's turn to merge the system turn into"):
        prepare(data, qwen3_folder, cache_dir=tmp_path, seed=0)


def test_template_options_reach_the_template(qwen3_folder: Path, tmp_path: Path) -> None:
    _, _, plain = rendered(qwen3_folder, tmp_path)
    _, _, off = rendered(qwen3_folder, tmp_path, template_options={"enable_thinking": False})
    assert plain.report.fingerprint != off.report.fingerprint
    renderer = ChatRenderer(Tokenizer.from_folder(qwen3_folder), options={"enable_thinking": False})
    prompt = renderer.tokenizer.decode(renderer.encode_prompt([text_message("user", "1+1?")]))
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


DATED = "{{ strftime_now('%d %b %Y') }}|"


def test_data_with_the_date_in_it_is_reused_on_the_same_day_only(
    smollm2_folder: Path, smollm2: Tokenizer, tmp_path: Path
) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text(DATED + (smollm2_folder / "chat_template.jinja").read_text())
    source = write(tmp_path / "r.jsonl", {"prompt": "q", "completion": "a"})
    data = DataSpec(train=[source], chat_template=str(template))

    def made(now: datetime, data: DataSpec = data) -> Prepared:
        return prepare(data, smollm2_folder, cache_dir=tmp_path, seed=0, now=now)

    morning = made(datetime(2026, 3, 1, 8))
    assert smollm2.decode(morning.train[0].ids).startswith("01 Mar 2026|")
    assert made(datetime(2026, 3, 1, 23)).report.from_cache
    tomorrow = made(datetime(2026, 3, 2, 8))
    assert not tomorrow.report.from_cache
    assert smollm2.decode(tomorrow.train[0].ids).startswith("02 Mar 2026|")
    again = made(datetime.fromisoformat(morning.report.moment))
    assert again.report.fingerprint == morning.report.fingerprint, "a run that is resumed later finds its own data"
    undated = data.model_copy(update={"chat_template": None})
    assert made(datetime(2026, 3, 1), undated).report.moment == ""
    assert made(datetime(2026, 3, 2), undated).report.from_cache


def test_every_process_tells_the_template_the_same_moment(smollm2_folder: Path, tmp_path: Path) -> None:
    from gym_data.preparing.documents import RowEncoder
    from gym_data.preparing.workers import Setup, Workers
    from gym_data.sources.jsonl import jsonl_chunks

    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%H:%M:%S.%f') }}" + (smollm2_folder / "chat_template.jinja").read_text())
    source = write(tmp_path / "r.jsonl", *[{"prompt": f"q{i}", "completion": "a"} for i in range(200)])
    data = DataSpec(train=[source], chat_template=str(template))
    encoder = RowEncoder(Tokenizer.from_folder(smollm2_folder), data)
    setup = Setup(str(smollm2_folder), data, None, bytes(8), encoder.now)
    with Workers(setup, 2) as workers:
        batches = list(workers.encode(jsonl_chunks(source.source, 2048), source, "prompt_completion"))
    assert len(batches) > 2
    starts = {batch.tokens[start : start + 8].tobytes() for batch in batches for start in _starts(batch.lengths)}
    assert len(starts) == 1


def _starts(lengths: Any) -> list[int]:
    return (np.cumsum(lengths) - lengths).tolist()


@pytest.mark.parametrize(
    ("source", "readings"),
    [
        ("{{ messages }}", []),
        ("{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}", ["2026"]),
        ("{%- set d = strftime_now('%d %b') %}{{ strftime_now(\"%Y\") }}", ["01 Mar", "2026"]),
        ("{{ strftime_now('%' + 'S') }}", ["2026-03-01T08:00:00"]),
        ("{% set clock = strftime_now %}{{ clock('%S') }}", ["2026-03-01T08:00:00"]),
        ("{{ strftime_now( }}", []),
    ],
)
def test_what_a_template_asks_of_the_clock(source: str, readings: list[str]) -> None:
    assert clock_readings(source, datetime(2026, 3, 1, 8)) == readings
