"""Guards which adapters are accepted: right architecture, keys that match, safetensors only, content ids."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from gym_sdk.errors import ModelError
from gym_serve.models import inspect_adapter, load_adapter


def tiny_model(hidden: int = 32, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=hidden,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    ).eval()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_a_loaded_adapter_acts(adapter: Path) -> None:
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        plain = tiny_model()(ids).logits
        tuned = load_adapter(tiny_model(), adapter)(ids).logits
    assert (plain - tuned).abs().max() > 0.01


def test_content_id_is_of_the_content(adapter: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(adapter, tmp_path / "copy")
    assert inspect_adapter(copy).content_id == inspect_adapter(adapter).content_id
    weights = load_file(copy / "adapter_model.safetensors")
    first = next(iter(weights))
    weights[first] = weights[first] + 1
    save_file(weights, copy / "adapter_model.safetensors")
    assert inspect_adapter(copy).content_id != inspect_adapter(adapter).content_id


def test_the_adapters_own_end_of_turn_wins(adapter: Path) -> None:
    (adapter / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_adapter(tiny_model(), adapter).generation_config.eos_token_id == [7, 9]


def rename_keys(folder: Path, old: str, new: str) -> None:
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({key.replace(old, new): value for key, value in weights.items()}, folder / "adapter_model.safetensors")


def pickle_only(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def truncate(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def no_kind(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: rename_keys(f, "q_proj", "query"), "modules are not there, such as model.layers.0.self_attn.query"),
        (
            lambda f: rename_keys(f, "base_model.model.model", "base_model.model.gpt"),
            "4 of its 4 modules are not there",
        ),
        (pickle_only, "a pickle file"),
        (truncate, "is damaged"),
        (no_kind, "what kind of adapter"),
        (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json"),
    ],
)
def test_a_bad_adapter_is_refused_with_the_reason(adapter: Path, damage, says: str) -> None:
    damage(adapter)
    with pytest.raises(ModelError, match=re.escape(says)):
        load_adapter(tiny_model(), adapter)


@pytest.mark.parametrize(
    ("model", "says"),
    [(tiny_model(hidden=64), "has 32 inputs, the model's"), (tiny_model(layers=1), "2 of its 4 modules are not there")],
)
def test_an_adapter_for_another_architecture_is_refused(adapter: Path, model: LlamaForCausalLM, says: str) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ModelError, match=re.escape(says)):
        load_adapter(model, adapter)
    assert model.state_dict().keys() == before.keys()  # refused before anything was changed
