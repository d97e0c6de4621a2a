"""Guards the fast way from texts to ids: used only where it gives the same ids, and held to that in use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from template_families import FAMILIES

from gym_data import Tokenizer, prepare
from gym_data.encoding import fast
from gym_sdk.errors import RunFailed
from gym_sdk.spec.data import DataSource, DataSpec

gigatoken = pytest.importorskip("gigatoken")


def folder(path: Path, family: str = "qwen3") -> Path:
    path.mkdir()
    made = FAMILIES[family]
    (path / "tokenizer.json").write_text(made.backend().to_str())
    (path / "chat_template.jinja").write_text(made.source())
    (path / "tokenizer_config.json").write_text(json.dumps(made.named_tokens()))
    return path


def test_a_tokenizer_that_it_does_not_know_is_encoded_by_tokenizers(smollm2_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(smollm2_folder)
    assert not tokenizer.fast_check.used
    assert "refuses this tokenizer" in tokenizer.fast_check.found
    ids, lengths = tokenizer.encode_texts(["a b", "<|im_end|>"])
    assert (ids.tolist(), lengths.tolist()) == ([*tokenizer.encode("a b"), 2], [2, 1])


def test_both_ways_prepare_the_same_store(tmp_path: Path) -> None:
    model = folder(tmp_path / "model")
    assert Tokenizer.from_folder(model).fast_check.found.startswith("equal ids for")
    rows = [{"prompt": f"Was ist {i}? 日本 <|im_end|>", "completion": f"é {i} " * (1 + i % 7)} for i in range(300)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSpec(train=[DataSource(source=str(tmp_path / "rows.jsonl"))])
    quick = prepare(data, model, cache_dir=tmp_path / "fast", seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "encoded", refused)
        slow = prepare(data, model, cache_dir=tmp_path / "slow", seed=0)
    for name in ("tokens", "loss_mask", "offsets"):
        assert np.array_equal(getattr(quick.train, name), getattr(slow.train, name))


def refused(encoder: Any, texts: Any) -> Any:
    raise RuntimeError("not today")


def shifted(changes: Callable[[list[str]], bool]) -> Callable[[Any, list[str]], Any]:
    """The encoder with a fault: other ids for the texts that `changes` says."""
    original = fast.encoded

    def faulty(encoder: Any, texts: list[str]) -> Any:
        ids, offsets = original(encoder, texts)
        return (ids + 1 if changes(texts) else ids), offsets

    return faulty


def test_other_ids_in_the_check_switch_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "encoded", shifted(lambda texts: True))
    tokenizer = Tokenizer.from_folder(folder(tmp_path / "model"))
    assert not tokenizer.fast_check.used
    assert "gives other ids for" in tokenizer.fast_check.found
    ids, _ = tokenizer.encode_texts(["hello"])
    assert ids.tolist() == tokenizer.encode("hello")


def test_other_ids_in_use_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "encoded", shifted(lambda texts: "broken" in texts))
    tokenizer = Tokenizer.from_folder(folder(tmp_path / "model"))
    assert tokenizer.fast_check.used
    tokenizer.encode_texts(["fine"] * fast.CHECKED_EVERY)
    with pytest.raises(RunFailed, match="gigatoken and tokenizers give different ids"):
        tokenizer.encode_texts(["broken"] * fast.CHECKED_EVERY)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_special_token_is_among_the_checked_texts(family: str) -> None:
    made = FAMILIES[family]
    tokenizer = made.tokenizer()
    special = [token.text for token in tokenizer.added_tokens if token.special]
    texts = fast.check_texts(tokenizer.backend, special)
    assert all(any(token in text for text in texts) for token in special)
    assert texts == fast.check_texts(tokenizer.backend, special)
