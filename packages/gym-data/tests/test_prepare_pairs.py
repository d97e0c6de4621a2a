"""Guards prepared pairs and labelled answers: pairs stay together, prompts are untrained, labels are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gym_data import Tokenizer, prepare
from gym_data.formats import format_named
from gym_data.record import Source
from gym_data.store import DocumentRole
from gym_sdk.errors import DataError
from gym_sdk.spec.data import DataSource, DataSpec

PROMPT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Name a bird."}]
CHOSEN = {"role": "assistant", "content": "A kea."}
REJECTED = {"role": "assistant", "content": "No."}


def write(path: Path, rows: list[dict[str, Any]]) -> DataSpec:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSpec(train=[DataSource(source=str(path))])


def test_three_ways_of_writing_a_preference_give_one_record() -> None:
    rows = {
        "preference": {"prompt": PROMPT, "chosen": [CHOSEN], "rejected": [REJECTED]},
        "openai_preference": {
            "input": {"messages": PROMPT},
            "preferred_output": [CHOSEN],
            "non_preferred_output": [REJECTED],
        },
    }
    shared = {"chosen": [*PROMPT, CHOSEN], "rejected": [*PROMPT, REJECTED]}
    place = Source("f", "", 1)
    records = [format_named(name).to_record(row, place) for name, row in [*rows.items(), ("preference", shared)]]
    canonical = {(record.kind, record.prompt, record.candidates) for record in records}
    assert len(canonical) == 1

    as_text = {"prompt": "Name a bird.", "chosen": "A kea.", "rejected": "No."}
    as_messages = {"chosen": [PROMPT[1], CHOSEN], "rejected": [PROMPT[1], REJECTED]}
    texts, messages = (format_named("preference").to_record(row, place) for row in (as_text, as_messages))
    assert (texts.prompt, texts.candidates) == (messages.prompt, messages.candidates)


def test_a_pair_is_a_group_whose_documents_share_an_untrained_prompt(smollm2_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"Question {i}?", "chosen": f"Good answer {i}.", "rejected": f"Bad {i}."} for i in range(7)]
    prepared = prepare(write(tmp_path / "pairs.jsonl", rows), smollm2_folder, cache_dir=tmp_path, seed=0)
    store, tokenizer = prepared.train, Tokenizer.from_folder(smollm2_folder)
    assert prepared.report.objective == "preference"
    assert (store.num_groups, len(store)) == (7, 14)
    for index in range(store.num_groups):
        chosen, rejected = store.group(index)
        assert (chosen.role, rejected.role) == (DocumentRole.CHOSEN, DocumentRole.REJECTED)
        assert chosen.row == rejected.row == index + 1
        start = int(chosen.loss_mask.argmax())
        assert chosen.ids[:start].tolist() == rejected.ids[:start].tolist()
        assert rejected.loss_mask[:start].sum() == 0
        assert tokenizer.decode(chosen.ids[chosen.loss_mask == 1]) == f"Good answer {index}.<|im_end|>"
        assert tokenizer.decode(rejected.ids[rejected.loss_mask == 1]) == f"Bad {index}.<|im_end|>"
        assert store.group_lengths[index] == len(chosen.ids) + len(rejected.ids)


def test_equal_sides_are_dropped_and_counted(smollm2_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": text} for text in ("c", "b", "d")]
    report = prepare(write(tmp_path / "p.jsonl", rows), smollm2_folder, cache_dir=tmp_path, seed=0).report
    assert report.dropped["chosen and rejected are equal"].lines == [f"{tmp_path}/p.jsonl:2"]
    assert (report.rows_in, report.rows_train, report.rows_dropped) == (3, 2, 1)


def test_labels_are_kept_and_one_sided_labels_are_refused(smollm2_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "completion": "a", "label": i % 2 == 0} for i in range(6)]
    prepared = prepare(write(tmp_path / "kto.jsonl", rows), smollm2_folder, cache_dir=tmp_path, seed=0)
    good, bad = DocumentRole.DESIRABLE, DocumentRole.UNDESIRABLE
    assert prepared.train.roles.tolist() == [good, bad] * 3
    assert prepared.report.labels == {"desirable": 3, "undesirable": 3}
    one_sided = write(tmp_path / "all.jsonl", [{**row, "label": True} for row in rows])
    with pytest.raises(DataError, match="all 6 labels are true: KTO learns from good and bad answers"):
        prepare(one_sided, smollm2_folder, cache_dir=tmp_path, seed=0)


def test_rows_of_the_wrong_kind_for_the_method_are_refused(smollm2_folder: Path, tmp_path: Path) -> None:
    chats = write(tmp_path / "chat.jsonl", [{"messages": [PROMPT[1], CHOSEN]}])
    with pytest.raises(DataError, match=r"chat.jsonl:1: the method needs pairs of chosen and rejected answers"):
        prepare(chats, smollm2_folder, cache_dir=tmp_path, seed=0, objective="preference")
    pairs = write(tmp_path / "p.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    as_labels = prepare(pairs, smollm2_folder, cache_dir=tmp_path, seed=0, objective="unpaired")
    assert as_labels.train.roles.tolist() == [DocumentRole.DESIRABLE, DocumentRole.UNDESIRABLE]
    assert as_labels.train.num_groups == 2
