"""Guards quantized bases and new tokens: what is merged says what was trained, new rows travel, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_adapter_artifacts import Fitted
from tiny_folder import write_tiny_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from gym_sdk.errors import ModelError, UserError
from gym_sdk.spec import spec_from_data
from gym_serve.models import load_adapter, load_model, resolve
from gym_trainer.adapters import attach
from gym_trainer.adapters.prequantized import check_prequantized
from gym_trainer.exporting.folder import Base
from gym_trainer.exporting.merge import merge_adapter
from gym_trainer.exporting.probe import probe_ids, probe_logits, relative_distance


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("wide"), hidden_size=64, intermediate_size=128)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_the_merge_of_a_quantized_run_says_what_was_trained_and_not_what_was_before_rounding(
    quantization: str, wide_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    fitted = Fitted(wide_folder, tmp_path, {"kind": "lora", "rank": 4}, quantization=quantization)
    ids = probe_ids(fitted.base)
    adapter = fitted.save(tmp_path / "adapter")
    merge_adapter(fitted.base, adapter, tmp_path / "merged", dtype="float32", metadata={}, quantization=quantization)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    right = relative_distance(fitted.logits, probe_logits(merged, ids))
    assert right < (1e-4 if quantization == "nf4" else 0.05)
    plain = load_adapter(load_model(fitted.base.resolved, dtype="float32"), adapter)
    # int8 also rounds what goes into each layer, which no merge can say
    share = 0.5 if quantization == "nf4" else 0.9
    assert right < share * relative_distance(fitted.logits, probe_logits(plain, ids))
    assert getattr(merged.config, "quantization_config", None) is None


def test_gradients_reach_the_first_layer_of_a_4_bit_model_that_was_evaluated_before(wide_folder: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    base = Base.of(resolve(str(wide_folder)))
    spec = spec_from_data({"model": {"source": "m"}, "data": {"train": [{"source": "d"}]}})
    model = attach(
        load_model(base.resolved, dtype="float32", quantization="nf4"),
        spec.adapter.model_copy(update={"rank": 4}),
        seed=0,
    ).model
    probe_logits(model, probe_ids(base))  # bitsandbytes would repack here on some processors
    model.train()
    model(input_ids=torch.tensor([probe_ids(base)])).logits.square().sum().backward()
    first = [p for name, p in model.named_parameters() if "layers.0." in name and "lora_B" in name]
    assert first
    assert all(p.grad is not None and bool(p.grad.any()) for p in first)


NEW = ["<note>", "</note>"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("adapter", [{"kind": "lora", "rank": 4}, {"kind": "full"}])
def test_new_tokens_are_trained_saved_and_kept_by_reload_and_merge(
    adapter: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", tied=tied)
    before = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight.shape[0]
    fitted = Fitted(folder, tmp_path, adapter, new_tokens=NEW)
    ids = [before, before + 1]
    assert fitted.base.new_token_ids == tuple(ids)
    assert fitted.base.tokenizer.encode("<note>", special="allow") == ids[:1]
    prompt = probe_ids(fitted.base)
    assert prompt[-2:] == ids
    expected = probe_logits(fitted.trained, prompt)
    assert expected.shape[1] == before + 2
    if adapter["kind"] == "full":
        return
    saved = fitted.save(tmp_path / "adapter")
    assert AutoTokenizer.from_pretrained(saved).convert_tokens_to_ids(NEW) == ids
    loaded = load_adapter(load_model(fitted.base.resolved, dtype="float32"), saved)
    assert relative_distance(expected, probe_logits(loaded, prompt)) < 1e-5
    merge_adapter(fitted.base, saved, tmp_path / "merged", dtype="float32", metadata={})
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert relative_distance(expected, probe_logits(merged, prompt)) < 1e-5
    assert merged.config.vocab_size == before + 2
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) is tied


def test_a_new_token_that_is_there_already_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    with pytest.raises(UserError, match=r"<\|im_start\|> is a token already"):
        Base.of(resolve(str(folder)), new_tokens=["<|im_start|>"])


@pytest.mark.parametrize(
    ("method", "values", "message"),
    [
        ("fp8", {}, "comes quantized by fp8, through whose layers transformers computes no gradients"),
        ("gptq", {}, "gptqmodel is not installed"),
        ("awq", {"adapter": {"kind": "full"}}, "its weights are integers"),
        ("gptq", {"model": {"source": "m", "quantization": "nf4"}}, "model.quantization is nf4"),
        ("bitsandbytes", {"output": {"merge": True}}, "no update can be added"),
    ],
)
def test_a_checkpoint_that_comes_quantized_is_recognised_and_refused_with_the_reason(
    method: str, values: dict[str, Any], message: str
) -> None:
    spec = spec_from_data({"model": {"source": "m"}, "data": {"train": [{"source": "d"}]}} | values)
    with pytest.raises(ModelError, match=message):
        check_prequantized(SimpleNamespace(quantization_config={"quant_method": method}), spec)
    check_prequantized(SimpleNamespace(), spec)


def test_only_the_last_layers_of_a_frozen_model_change(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", tied=False)
    before = dict(load_model(resolve(str(folder)), dtype="float32").named_parameters())
    fitted = Fitted(folder, tmp_path, {"kind": "freeze", "num_layers": 1, "modules_to_save": ["norm"]})
    changed = {name for name, p in fitted.trained.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all(name.startswith("model.layers.1.") or name == "model.norm.weight" for name in changed)
    assert "model.norm.weight" in changed


def test_fused_experts_are_said_to_be_frozen_or_adapted_on_purpose(tmp_path: Path) -> None:
    from gym_trainer.matrix.architectures import Architecture
    from gym_trainer.matrix.tiny import write_tiny_model

    architecture = Architecture(model_type="qwen3_moe", class_name="Qwen3MoeForCausalLM", group="decoder")
    folder = write_tiny_model(architecture, tmp_path / "moe")
    model = load_model(resolve(str(folder)), dtype="float32")
    spec = spec_from_data({"model": {"source": "m"}, "data": {"train": [{"source": "d"}]}, "adapter": {"kind": "lora"}})
    attached = attach(model, spec.adapter.model_copy(update={"rank": 4}), seed=0)
    assert any("stay frozen" in note and "adapter.experts=adapt" in note for note in attached.notes)
    assert not any("experts" in name for name, p in attached.model.named_parameters() if p.requires_grad)

    adapted = Fitted(folder, tmp_path, {"kind": "lora", "rank": 4, "experts": "adapt"})
    ids = probe_ids(adapted.base)
    saved = adapted.save(tmp_path / "adapter")
    assert len(json.loads((saved / "adapter_config.json").read_text())["target_parameters"]) == 8
    merge_adapter(adapted.base, saved, tmp_path / "merged", dtype="float32", metadata={})
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert relative_distance(adapted.logits, probe_logits(merged, ids)) < 1e-5
