"""Guards the quickstart's task: the committed rows are the generator's; the splits share nothing to know by heart."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
SPLITS = ("train", "held_out")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    specification = importlib.util.spec_from_file_location("patrol_notes", QUICKSTART / "generate.py")
    assert specification
    assert specification.loader
    module = importlib.util.module_from_spec(specification)
    sys.modules["patrol_notes"] = module
    specification.loader.exec_module(module)
    return module


def committed(split: str) -> list[tuple[str, dict[str, Any]]]:
    """The note and the record of every row."""
    rows = [json.loads(line)["messages"] for line in (QUICKSTART / f"{split}.jsonl").read_bytes().splitlines()]
    assert all([message["role"] for message in row] == ["system", "user", "assistant"] for row in rows)
    return [(row[1]["content"], json.loads(row[2]["content"])) for row in rows]


def test_the_committed_rows_are_the_generators_bytes(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py", "--out", str(tmp_path)])
    generator.main()
    for split in SPLITS:
        assert (tmp_path / f"{split}.jsonl").read_bytes() == (QUICKSTART / f"{split}.jsonl").read_bytes()


def test_there_are_enough_held_out_rows_and_none_is_twice() -> None:
    notes = [note for split in SPLITS for note, _ in committed(split)]
    assert len(notes) == len(set(notes))
    assert len(committed("held_out")) >= 200


def test_answers_are_canonical(generator: ModuleType) -> None:
    for split in SPLITS:
        for line in (QUICKSTART / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
            text = json.loads(line)["messages"][2]["content"]
            answer = json.loads(text)
            assert text == json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
            assert list(answer) == ["species", "count", "activity", "place", "time", "threat"]
            assert answer["species"] == answer["species"].lower()
            assert answer["count"] is None or (type(answer["count"]) is int and answer["count"] > 0)
            assert answer["activity"] in (*generator.ACTIVITIES, None)
            assert answer["time"] is None or re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", answer["time"])
            assert answer["threat"] in generator.THREATS


@pytest.mark.parametrize("field", ["place", "activity", "count", "time"])
def test_fields_are_sometimes_missing(field: str) -> None:
    for split in SPLITS:
        missing = [answer[field] is None for _, answer in committed(split)]
        assert 0.02 < sum(missing) / len(missing) < 0.5


def test_a_place_is_in_the_note_and_the_time_in_no_other_form_than_a_reader_knows() -> None:
    for split in SPLITS:
        for note, answer in committed(split):
            if answer["place"]:
                assert answer["place"].lower() in note.lower()
            digits = re.findall(r"\d\d?", note)
            if answer["time"] and not re.search(
                r"past|quarter|noon|in the (?:morning|afternoon|evening)", note.lower()
            ):
                hour, minute = answer["time"].split(":")
                assert {hour, str(int(hour)), str((int(hour) - 1) % 12 + 1)} & set(digits)
                assert minute in digits or minute == "00"


def test_the_splits_share_no_combination_of_entities() -> None:
    def combinations(split: str) -> set[tuple[str, Any]]:
        answers = [answer for _, answer in committed(split)]
        with_activity = {(answer["species"], answer["activity"]) for answer in answers}
        with_place = {(answer["species"], answer["place"]) for answer in answers if answer["place"]}
        return with_activity | with_place

    def places(split: str) -> set[str]:
        return {answer["place"] for _, answer in committed(split)} - {None}

    assert not combinations("train") & combinations("held_out")
    assert not places("train") & places("held_out")
    unseen = {answer["species"] for _, answer in committed("held_out")} - {a["species"] for _, a in committed("train")}
    assert len(unseen) >= 4


def test_the_splits_share_no_sentence_of_the_grammar(generator: ModuleType) -> None:
    """Every sentence that a row was made from, by the generator's own word."""

    def sentences(split: str) -> set[str]:
        num_rows = len(committed(split))
        rows = generator.make_rows(split, num_rows, seed=7)
        return {re.sub(r"\W+", " ", sentence).strip().lower() for row in rows for sentence in row.sentences}

    train, held_out = sentences("train"), sentences("held_out")
    assert len(train) > 100
    assert len(held_out) > 60
    assert not train & held_out


def test_the_splits_share_no_sentence_pattern_as_written(generator: ModuleType) -> None:
    """The same without the generator's word: what each sentence is when names, animals and numbers are masked."""
    shared = generator.read_wording()["shared"]
    animals = [
        form for row in (*shared["species"], *shared["species_held_out"]) for form in (row[0], row[1], row[3]) if form
    ]
    places = [f"{stem} {feature}" for stem in shared["places_stem"] for feature in shared["places_feature"]]
    words = [*animals, *places, *shared["names"], *shared["units"], *shared["numbers"]]
    entity = re.compile("|".join(re.escape(word.lower()) for word in sorted(words, key=len, reverse=True)))

    def patterns(split: str) -> set[str]:
        found: set[str] = set()
        for note, _ in committed(split):
            for sentence in re.split(r"(?<=[.!?])\s+", note.lower()):
                masked = re.sub(r"[\d.:h]*\d[\d.:h]*(?:am|pm| hrs)?", "#", entity.sub("#", sentence))
                pattern = " ".join(re.findall(r"[a-z#]+", masked))
                if len(re.findall(r"[a-z]{2,}", pattern)) >= 3:  # "over" and "at #" are no pattern
                    found.add(pattern)
        return found

    train, held_out = patterns("train"), patterns("held_out")
    assert min(len(train), len(held_out)) > 100
    assert not train & held_out
