"""Guards wrapping: no token is lost or twice, every block is full, no piece crosses a document."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_data import Document, Tokenizer, prepare
from gym_data.packing.wrapped import Wrapper, pieces_of
from gym_sdk.errors import DataError
from gym_sdk.spec.data import DataSource, DataSpec, EvalSplit

LENGTHS = st.lists(st.integers(2, 50), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(8, 64))
def test_blocks_are_full_and_pieces_stay_within_documents(lengths: list[int], block_tokens: int) -> None:
    offsets = np.cumsum([0, *lengths])
    pieces = pieces_of(offsets, block_tokens)
    total = sum(lengths) - (sum(lengths) % block_tokens == 1)
    assert np.diff(pieces.offsets).sum() == total
    blocks = np.diff(pieces.offsets[pieces.blocks])
    assert (blocks[:-1] == block_tokens).all()
    assert 2 <= blocks[-1] <= block_tokens or not total
    for start, stop, document in zip(pieces.offsets, pieces.offsets[1:], pieces.documents, strict=False):
        assert offsets[document] <= start < stop <= offsets[document + 1]


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(8, 64))
def test_documents_one_by_one_give_the_same_blocks(lengths: list[int], block_tokens: int) -> None:
    offsets = np.cumsum([0, *lengths])
    tokens = np.arange(offsets[-1], dtype=np.uint32)
    wrapper = Wrapper(block_tokens)
    found = []
    for number, (start, stop) in enumerate(pairwise(offsets)):
        wrapper.add(Document(tokens[start:stop], np.ones(stop - start, np.uint8), number))
        kept = Wrapper(block_tokens)
        kept.rest = wrapper.rest
        wrapper = kept
        while block := wrapper.pop():
            found.append(block)
    pieces = pieces_of(offsets, block_tokens)
    ends = [len(document.ids) for block in found for document in block]
    assert ends == np.diff(pieces.offsets)[: len(ends)].tolist()
    assert [d.row for block in found for d in block] == pieces.documents[: len(ends)].tolist()
    given_tokens = np.concatenate([d.ids for block in found for d in block]) if found else tokens[:0]
    assert np.array_equal(given_tokens, tokens[: len(given_tokens)])
    assert len(tokens) - len(given_tokens) < block_tokens


def test_text_is_prepared_in_full_blocks_whose_tokens_are_the_documents(
    smollm2_folder: Path, smollm2: Tokenizer, tmp_path: Path
) -> None:
    texts = [f"The kea number {i} flew over the ridge. " * (1 + i % 30) for i in range(60)]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = DataSpec(
        train=[DataSource(source=str(path))],
        packing_strategy="wrapped",
        max_length=128,
        eval=EvalSplit(split=0.1),
    )
    made = prepare(data, smollm2_folder, cache_dir=tmp_path, seed=0)
    assert made.eval is not None
    assert set(made.train.group_lengths[:-1].tolist()) == {128}
    assert made.report.pack_fill > 0.98
    both = [*made.train, *made.eval]
    held = {document.row for document in made.eval}
    assert not held & {document.row for document in made.train}, "a document stands on both sides"
    for number, text in enumerate(texts, 1):
        ids = np.concatenate([document.ids for document in both if document.row == number])
        whole = [*smollm2.encode(text), smollm2.eos_ids[0]]
        assert ids.tolist() in (whole, whole[:-1])  # the last block may lose one token
    assert made.report.lengths.maximum > 128


def test_only_plain_text_is_wrapped(smollm2_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b"}))
    data = DataSpec(train=[DataSource(source=str(path))], packing_strategy="wrapped")
    with pytest.raises(DataError, match=r"c.jsonl:1: data.packing_strategy: wrapped cuts rows at any token, but"):
        prepare(data, smollm2_folder, cache_dir=tmp_path, seed=0)
