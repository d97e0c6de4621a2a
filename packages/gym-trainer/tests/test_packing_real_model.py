"""Guards packing on a real model: rows side by side give the logits that each gives alone, position by position."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gym_data import prepare
from gym_data.packing import micro_batches
from gym_sdk.spec.data import DataSource, DataSpec
from gym_trainer.fast import attention
from gym_trainer.loop.batch import StoreRows, make_micro_batch

QUESTIONS = [
    ("How many legs has a spider?", "Eight."),
    ("Name a bird of New Zealand.", "The kea, a parrot of the mountains that opens rubbish bins."),
    ("2 + 2?", "4"),
    ("Say hello in Maori, and what it means.", "Kia ora. It is a greeting, and wishes the other one to be well."),
    ("Which is the longest river?", "The Nile, or the Amazon: it depends on where one begins to measure."),
]


@pytest.mark.parametrize("kind", ["chats", "wrapped"])
def test_packed_logits_equal_those_of_each_document_alone(smollm2_folder: Path, tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    rows = [{"prompt": question, "completion": answer} for question, answer in QUESTIONS]
    if kind == "wrapped":
        rows = [{"text": f"{question} {answer}"} for question, answer in QUESTIONS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSpec(
        train=[DataSource(source=str(tmp_path / "rows.jsonl"))],
        max_length=32 if kind == "wrapped" else 256,
        packing_strategy="wrapped" if kind == "wrapped" else "best_fit",
    )
    store = prepare(data, smollm2_folder, cache_dir=tmp_path, seed=0).train
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    source = StoreRows(store)
    (chosen,) = micro_batches(range(len(source)), source.lengths_N, 1024)
    batch = make_micro_batch([source.row(index) for index in chosen], layout="packed", device="cpu")
    documents = [document for row in batch.rows for document in row.documents]
    lengths = [len(document.ids) for document in documents]
    assert len(documents) > 4
    assert batch.position_ids[0].tolist() == [place for length in lengths for place in range(length)]
    with torch.no_grad():
        alone = torch.cat([model(torch.from_numpy(d.ids.astype("int64"))[None]).logits[0] for d in documents])
        with attention.attention_of(model, attention.choose(model.config, "cpu", torch.float32)):
            packed = model(**batch.model_inputs()).logits[0]
    torch.testing.assert_close(packed, alone, atol=2e-4, rtol=1e-4)
    assert torch.equal(packed.argmax(-1), alone.argmax(-1))
    # The tolerance is far below what another document in sight would change.
    with torch.no_grad():
        leaking = model(batch.input_ids).logits[0]
    second = slice(lengths[0], sum(lengths[:2]))
    assert (leaking[second] - alone[second]).abs().max() > 1
