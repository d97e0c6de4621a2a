"""Guards models that mind what is padded behind a document: found by a forward, and trained a row a micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import final_weights, fit_tiny, tiny_spec
from tiny_rows import tiny_model

from gym_sdk.errors import ModelError
from gym_sdk.spec import Dpo
from gym_trainer.fast.attention import is_moved_by_padding
from gym_trainer.loop import fit as loop_fit


def test_a_model_without_a_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    assert not is_moved_by_padding(model)
    forward = model.forward

    def from_the_right(input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        found = forward(input_ids=input_ids, **kwargs)
        found.logits = found.logits + found.logits[:, -1:]
        return found

    monkeypatch.setattr(model, "forward", from_the_right)
    assert is_moved_by_padding(model)


def test_its_rows_are_trained_alone_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny_spec(max_steps=3, adapter={"kind": "lora", "rank": 4})
    fit_tiny(tmp_path / "padded", spec, packed=False)
    monkeypatch.setattr(loop_fit, "is_moved_by_padding", lambda model: True)
    assert fit_tiny(tmp_path / "alone", spec, packed=False).micro_batch_tokens == 1
    padded, alone = final_weights(tmp_path / "padded"), final_weights(tmp_path / "alone")
    assert all(torch.allclose(padded[name], alone[name], atol=1e-5) for name in padded)
    with pytest.raises(ModelError, match="a pair's two answers cannot be compared without it"):
        fit_tiny(tmp_path / "pairs", spec.model_copy(update={"method": Dpo()}), packed=False)
