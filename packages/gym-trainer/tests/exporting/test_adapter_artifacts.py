"""Guards artifacts: what plain transformers and peft load says what the trained model said, or it is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from tiny_folder import TEMPLATE, write_rows, write_tiny_folder
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from gym_data import prepare
from gym_sdk.errors import OutputInUse, RunFailed, UserError
from gym_sdk.events import EventWriter
from gym_sdk.spec import RunSpec, spec_from_data
from gym_serve.models import load_model, resolve
from gym_serve.models.adapters import grow_embeddings
from gym_trainer.adapters import attach
from gym_trainer.adapters.first_batches import first_batches
from gym_trainer.exporting.adapter import save_adapter, trained_weights
from gym_trainer.exporting.folder import Base, complete_or_absent
from gym_trainer.exporting.merge import merge_adapter
from gym_trainer.exporting.model import save_model
from gym_trainer.exporting.probe import probe_ids, probe_logits, relative_distance
from gym_trainer.fast import attention
from gym_trainer.loop.batch import StoreRows
from gym_trainer.loop.fit import FitSettings, fit
from gym_trainer.objectives.sft import SftObjective

KINDS = {
    "lora": {},
    "rslora": {"scaling": "rslora"},
    "dora": {"dora": True},
    "pissa": {"init": "pissa"},
    "olora": {"init": "olora"},
    "pissa+dora+rslora": {"init": "pissa", "dora": True, "scaling": "rslora"},
    "head": {"targets": ["q_proj", "lm_head"]},
    "eva": {"init": "eva"},
    "lora+": {"lora_plus_factor": 4.0},
    "saved norm": {"modules_to_save": ["norm"]},
    "regular expression": {"targets": r".*layers\.1\..*(q|v)_proj"},
    "oft": {"kind": "oft", "block_size": 8},
    "vera": {"kind": "vera", "rank": 64},
    "ia3": {"kind": "ia3"},
}


class Fitted:
    """A tiny model trained for a few steps."""

    def __init__(
        self,
        folder: Path,
        tmp_path: Path,
        adapter: dict[str, Any],
        *,
        steps: int = 4,
        quantization: str = "none",
        new_tokens: Sequence[str] = (),
    ) -> None:
        data = {"train": [{"source": str(write_rows(tmp_path / "rows.jsonl"))}]}
        self.spec: RunSpec = spec_from_data(
            {
                "model": {"source": str(folder), "quantization": quantization, "new_tokens": list(new_tokens)},
                "adapter": adapter,
                "data": data,
                "train": {"max_steps": steps, "learning_rate": 2e-2, "batch_size": 8, "schedule": "constant"},
            }
        )
        self.base = Base.of(resolve(str(folder)), new_tokens=new_tokens)
        self.model = load_model(self.base.resolved, dtype="float32", quantization=self.spec.model.quantization)
        if new_tokens:
            grow_embeddings(self.model, max(self.base.new_token_ids) + 1)
        self.base_logits = probe_logits(self.model, probe_ids(self.base))
        prepared = prepare(self.spec.data, folder, cache_dir=tmp_path / "cache", seed=0)
        rows = StoreRows(prepared.train)
        attached = attach(
            self.model,
            self.spec.adapter,
            seed=0,
            new_token_ids=self.base.new_token_ids,
            first_batches=lambda: first_batches(rows, "cpu"),
        )
        self.trained = attached.model
        self.initial = trained_weights(self.trained)
        settings = FitSettings(
            device="cpu",
            dtype=torch.float32,
            attention=attention.choose(self.model.config, "cpu", torch.float32),
            packed=True,
            micro_batch_tokens=400,
        )
        (tmp_path / "checkpoints").mkdir()
        with EventWriter(tmp_path / "events.jsonl") as events:
            fit(
                self.trained,
                self.spec,
                settings,
                SftObjective(),
                train_rows=rows,
                eval_rows=None,
                run_path=tmp_path,
                events=events,
            )
        self.trained.eval()

    @property
    def logits(self) -> torch.Tensor:
        return probe_logits(self.trained, probe_ids(self.base))

    def save(self, folder: Path) -> Path:
        save_adapter(self.trained, folder, self.base, initial=self.initial, metadata={"run": "r"})
        return folder


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_reloaded_adapter_and_its_merge_say_what_training_left(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    adapter_values = KINDS[kind] if "kind" in KINDS[kind] else {"kind": "lora", "rank": 4} | KINDS[kind]
    fitted = Fitted(tiny_folder, tmp_path, adapter_values)
    assert relative_distance(fitted.base_logits, fitted.logits) > 0.05
    ids = probe_ids(fitted.base)
    adapter = fitted.save(tmp_path / "adapter")

    plain_base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    if kind == "head":
        plain_base.lm_head.weight = torch.nn.Parameter(plain_base.lm_head.weight.detach().clone())
    plain = PeftModel.from_pretrained(plain_base, str(adapter))
    assert relative_distance(fitted.logits, probe_logits(plain, ids)) < 1e-5

    check = merge_adapter(fitted.base, adapter, tmp_path / "merged", dtype="float32", metadata={})
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert check.adapter_to_merged < 1e-5 < 0.05 < check.base_to_adapter
    assert relative_distance(fitted.logits, probe_logits(merged, ids)) < 1e-5
    tied = merged.lm_head.weight is merged.model.embed_tokens.weight
    assert tied is (kind != "head")

    merge_adapter(fitted.base, adapter, tmp_path / "bf16", dtype="bfloat16", metadata={})
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    assert rounded.dtype == torch.bfloat16
    assert relative_distance(fitted.logits, probe_logits(rounded, ids)) < 0.05


def test_an_adapter_folder_carries_template_end_of_sequence_and_base(tiny_folder: Path, tmp_path: Path) -> None:
    fitted = Fitted(tiny_folder, tmp_path, {"kind": "lora", "rank": 4})
    adapter = fitted.save(tmp_path / "adapter")

    tokenizer = AutoTokenizer.from_pretrained(adapter)
    chat = [{"role": "user", "content": "3 lions"}, {"role": "assistant", "content": "ok"}]
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.apply_chat_template(chat, tokenize=False) == (
        "<|im_start|>user\n3 lions<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
    )
    assert GenerationConfig.from_pretrained(adapter).eos_token_id == [2]
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_folder)
    model = AutoPeftModelForCausalLM.from_pretrained(adapter)
    assert relative_distance(fitted.logits, probe_logits(model, probe_ids(fitted.base))) < 1e-5
    metadata = json.loads((adapter / "gym.json").read_text())
    assert metadata["base"]["content_id"] == fitted.base.resolved.content_id
    assert metadata["stop_ids"] == [2]


@pytest.mark.parametrize("tied", [True, False])
def test_a_fully_trained_model_reloads_with_equal_logits_and_its_head_as_it_was(tied: bool, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", tied=tied)
    fitted = Fitted(folder, tmp_path, {"kind": "full"})
    save_model(fitted.trained, tmp_path / "model", fitted.base, base_logits_TV=fitted.base_logits, metadata={})
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(fitted.logits, probe_logits(reloaded, probe_ids(fitted.base)))
    assert (reloaded.lm_head.weight is reloaded.model.embed_tokens.weight) is tied
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == TEMPLATE


def test_an_adapter_that_changes_nothing_is_refused_by_export_and_merge(tiny_folder: Path, tmp_path: Path) -> None:
    base = Base.of(resolve(str(tiny_folder)))
    spec = spec_from_data({"model": {"source": "m"}, "data": {"train": [{"source": "d"}]}, "adapter": {"kind": "lora"}})
    for number, adapter in enumerate([spec.adapter, spec.adapter.model_copy(update={"init": "pissa"})]):
        model = attach(load_model(base.resolved, dtype="float32"), adapter, seed=0).model
        with pytest.raises(RunFailed, match="training changed no weight"):
            save_adapter(model, tmp_path / f"{number}", base, initial=trained_weights(model), metadata={})
        assert not (tmp_path / f"{number}").exists()
    model = attach(load_model(base.resolved, dtype="float32"), spec.adapter, seed=0).model
    model.save_pretrained(tmp_path / "untouched")
    with pytest.raises(UserError, match="changes nothing"):
        merge_adapter(base, tmp_path / "untouched", tmp_path / "out", dtype="float32", metadata={})
    assert not (tmp_path / "out").exists()


def test_an_update_too_small_for_bfloat16_is_refused_with_the_way_out(tiny_folder: Path, tmp_path: Path) -> None:
    fitted = Fitted(tiny_folder, tmp_path, {"kind": "lora", "rank": 4})
    for name, parameter in fitted.trained.named_parameters():
        if "lora_B" in name:
            parameter.data *= 1e-4
    adapter = fitted.save(tmp_path / "adapter")
    with pytest.raises(UserError, match="bfloat16 would round away what the adapter changes") as error:
        merge_adapter(fitted.base, adapter, tmp_path / "out", dtype="bfloat16", metadata={})
    assert "--dtype float32" in str(error.value)
    merge_adapter(fitted.base, adapter, tmp_path / "out", dtype="float32", metadata={})


def test_a_folder_that_holds_something_is_never_written_into(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputInUse), complete_or_absent(tmp_path / "out"):
        pytest.fail("the block must not run")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def test_a_failure_while_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail() -> None:
        with complete_or_absent(tmp_path / "out") as staged:
            (staged / "weights").write_bytes(b"half")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fail()
    assert list(tmp_path.iterdir()) == []
