"""Guards that a setting beside `adapter.init_from` is either the loaded adapter's own or refused, never ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_folder import write_tiny_folder

from gym_sdk.errors import ModelError
from gym_sdk.spec.adapter import AdapterSpec, LoraAdapter, OftAdapter
from gym_serve.models import load_model, resolve
from gym_trainer.adapters import attach

SAVED = LoraAdapter(rank=4, alpha=6.0, targets=["q_proj", "v_proj"], scaling="rslora")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("going-on")
    write_tiny_folder(folder / "tiny")
    _attached(folder, SAVED).save_pretrained(folder / "adapter")
    return folder


def _attached(folder: Path, adapter: AdapterSpec, new_token_ids: tuple[int, ...] = ()) -> Any:
    model = load_model(resolve(str(folder / "tiny")), dtype="float32")
    return attach(model, adapter, seed=0, new_token_ids=new_token_ids).model


@pytest.mark.parametrize("given", [{}, {"rank": 4}, {"alpha": 6.0, "targets": ["v_proj", "q_proj"]}])
def test_settings_that_are_the_adapters_own_are_taken(folder: Path, given: dict[str, Any]) -> None:
    model = _attached(folder, LoraAdapter(init_from=str(folder / "adapter"), **given))
    assert model.peft_config["default"].r == 4
    assert all("q_proj" in name or "v_proj" in name for name, p in model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("given", "asked", "held"),
    [
        ({"rank": 8}, "8", "4"),
        ({"dropout": 0.1}, "0.1", "0.0"),
        ({"dora": True}, "True", "False"),
        ({"targets": ["q_proj"]}, "q_proj", "q_proj, v_proj"),
        ({"modules_to_save": ["norm"]}, "norm", "none"),
    ],
)
def test_other_settings_are_refused(folder: Path, given: dict[str, Any], asked: str, held: str) -> None:
    with pytest.raises(ModelError) as caught:
        _attached(folder, LoraAdapter(init_from=str(folder / "adapter"), **given))
    (name,) = given
    assert caught.value.message == f"adapter.{name} is {asked}, and the adapter in adapter.init_from has {held}"


def test_another_kind_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter\.kind is oft, and the adapter in adapter\.init_from has lora"):
        _attached(folder, OftAdapter(init_from=str(folder / "adapter")))


def test_new_tokens_whose_rows_the_adapter_does_not_train_are_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="does not train the embedding of token 5"):
        _attached(folder, LoraAdapter(init_from=str(folder / "adapter")), new_token_ids=(5,))
