"""Guards several adapters in one model: one is trained, the others stay bit for bit, each answers as it does alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import fit_tiny, tiny_spec
from known import build_preference, pair_store
from safetensors.torch import load_file
from test_methods_resume import StopAfter
from tiny_folder import note_rows, write_tiny_folder
from tiny_rows import tiny_model

from gym_data import TokenStore
from gym_sdk.cli._root import run as gym
from gym_sdk.errors import ModelError, SpecError
from gym_sdk.rundir import RunDir, find_runs
from gym_sdk.spec import Dpo, spec_from_data
from gym_sdk.spec.adapter import LoraAdapter, NamedAdapter
from gym_serve.models import load_adapter
from gym_trainer.adapters import attach
from gym_trainer.adapters.beside import answering_as, beside_bytes
from gym_trainer.fast.apply import FastPath, applied
from gym_trainer.fast.attention import PER_DOCUMENT, attention_of
from gym_trainer.fast.layers import decoder_layers
from gym_trainer.loop.batch import MicroBatch, make_micro_batch
from gym_trainer.loop.forward import ForwardModel
from gym_trainer.objectives.logprobs import answer_sums
from gym_trainer.objectives.reference import OtherAdapter

IDS = torch.arange(2, 30)[None]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of another rank on fewer layers, far from its start."""
    return _write_adapter(tmp_path_factory.mktemp("other"), rank=2, targets=["q_proj", "down_proj"])


def _write_adapter(folder: Path, **settings: Any) -> Path:
    model = attach(tiny_model(), LoraAdapter(**settings), seed=7).model
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def _beside(folder: Path, **settings: Any) -> LoraAdapter:
    return LoraAdapter(rank=4, beside=[NamedAdapter(name="other", source=str(folder))], **settings)


def _answers(model: ForwardModel, batch: MicroBatch) -> torch.Tensor:
    return answer_sums(model.logprobs(batch), batch)


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


def test_each_adapter_answers_as_it_does_alone(other: Path) -> None:
    both = attach(tiny_model(), _beside(other, init_from=None), seed=0).model
    trained = [name for name, p in both.named_parameters() if p.requires_grad]
    with torch.no_grad():
        dict(both.named_parameters())[trained[1]].fill_(0.1)
    mine = _logits(both)
    with answering_as(both, "other"):
        others = _logits(both)
    assert torch.equal(others, _logits(load_adapter(tiny_model(), other)))
    assert not torch.equal(mine, others)
    assert not torch.equal(mine, _logits(tiny_model()))
    assert torch.equal(mine, _logits(both))
    assert [name for name, p in both.named_parameters() if p.requires_grad] == trained
    assert all(".default." in name for name in trained)


def test_training_changes_the_one_and_leaves_the_other_bit_for_bit_also_when_resumed(
    other: Path, tmp_path: Path
) -> None:
    adapter = {"kind": "lora", "rank": 4, "dropout": 0.1, "beside": [{"name": "other", "source": str(other)}]}
    spec = tiny_spec(adapter=adapter, epochs=1)
    fit_tiny(tmp_path / "whole", spec)
    stopped = tmp_path / "stopped"
    assert fit_tiny(stopped, spec, stop=StopAfter(stopped, 3)).paused
    assert fit_tiny(stopped, spec, resume=True).resumed_from in (3, 4)
    alone = tiny_spec(adapter=adapter | {"beside": []}, epochs=1)
    fit_tiny(tmp_path / "alone", alone)
    whole, again, single = (
        load_file(tmp_path / name / "checkpoints/checkpoint-6/adapter_model.safetensors")
        for name in ("whole", "stopped", "alone")
    )
    assert all(torch.equal(whole[key], again[key]) and torch.equal(whole[key], single[key]) for key in whole)
    assert any(bool(value.any()) for key, value in whole.items() if "lora_B" in key)
    first = load_file(other / "adapter_model.safetensors")
    for name in ("whole", "stopped"):
        kept = load_file(tmp_path / name / "checkpoints/checkpoint-6/other/adapter_model.safetensors")
        assert kept.keys() == first.keys()
        assert all(torch.equal(kept[key], first[key]) for key in first)


@pytest.mark.parametrize("fused", [False, True])
def test_a_named_adapter_is_the_reference_of_a_preference_method(other: Path, fused: bool) -> None:
    objective = build_preference(Dpo(beta=0.3), OtherAdapter("other"))
    store: TokenStore = pair_store()  # pyright: ignore[reportAssignmentType]
    rows = objective.rows(store)
    batch = make_micro_batch([rows.row(index) for index in range(len(rows))], layout="packed", device="cpu")
    both = attach(tiny_model(), _beside(other), seed=0).model
    with attention_of(both.get_base_model(), PER_DOCUMENT), applied(both.train(), FastPath(fused=fused)):
        assert all(("forward" in vars(layer)) == fused for layer in decoder_layers(both))
        model = ForwardModel(both)
        reference = OtherAdapter("other").logprobs(model, batch, _answers)
        policy = _answers(model, batch)
    alone = ForwardModel(load_adapter(tiny_model(), other))
    with attention_of(alone.wrapped.get_base_model(), PER_DOCUMENT), torch.no_grad():
        expected = _answers(alone, batch)
    assert torch.allclose(reference, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(policy.detach(), reference, rtol=1e-2)
    assert not reference.requires_grad
    assert policy.requires_grad


def test_the_plan_counts_the_bytes_of_every_adapter_beside(other: Path) -> None:
    weights = load_file(other / "adapter_model.safetensors")
    assert beside_bytes(_beside(other)) == sum(4 * value.numel() for value in weights.values()) > 0
    assert beside_bytes(LoraAdapter()) == 0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"adapter": {"beside": ["default"]}}, "default is the trained adapter's name"),
        ({"adapter": {"beside": ["sft", "sft"]}}, "sft is also adapter.beside[0]'s name"),
        ({"adapter": {"beside": ["ora"]}}, "peft takes ora for a part of its own names (lora_...)"),
        ({"adapter": {"beside": ["a.b"]}}, "must be text of the form"),
        ({"adapter": {"beside": ["sft"], "init": "pissa"}}, "pissa changes the weights that the adapters of"),
        ({"adapter": {"kind": "full", "beside": ["sft"]}}, "beside"),
        (
            {"adapter": {"beside": ["sft"]}, "method": {"kind": "dpo", "reference_adapter": "stf"}},
            "adapter.beside has no stf (sft)",
        ),
        (
            {
                "adapter": {"beside": ["sft"]},
                "method": {"kind": "kto", "reference_adapter": "sft", "reference": "precomputed"},
            },
            "method.reference_adapter stands in its place",
        ),
    ],
)
def test_names_that_cannot_work_are_found_with_the_specification(sections: dict[str, Any], message: str) -> None:
    adapter = sections["adapter"] | {"beside": [{"name": n, "source": "a"} for n in sections["adapter"]["beside"]]}
    data = {"model": {"source": "m"}, "data": {"train": [{"source": "d"}]}}
    with pytest.raises(SpecError) as caught:
        spec_from_data(data | sections | {"adapter": adapter})
    assert message in str(caught.value)


def test_an_adapter_of_another_kind_or_model_is_refused(other: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    attach(tiny_model(hidden_size=64), LoraAdapter(rank=4), seed=0).model.save_pretrained(wide)
    with pytest.raises(ModelError, match="does not fit this model"):
        attach(tiny_model(), _beside(wide), seed=0)
    config = json.loads((other / "adapter_config.json").read_text())
    changed = tmp_path / "ia3"
    changed.mkdir()
    (changed / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    (changed / "adapter_model.safetensors").write_bytes((other / "adapter_model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="other is of kind ia3, and the trained adapter of kind lora"):
        attach(tiny_model(), _beside(changed), seed=0)
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        attach(tiny_model(), _beside(tmp_path / "nowhere"), seed=0)


SPEC = """\
name: notes
model: {source: ./tiny}
adapter: {rank: 4}
data: {train: [{source: rows.jsonl}], max_length: 256}
train: {batch_size: 4, max_steps: 4, learning_rate: 1.0e-2}
output: {dir: runs}
"""


def test_a_run_keeps_each_adapter_in_a_folder_and_exports_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_folder(tmp_path / "tiny")
    monkeypatch.setenv("GYM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(SPEC)
    chats = note_rows(16)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    assert gym(["train", "run.yaml", "output.dir=sft", "--quiet"]) == 0
    (sft,) = (RunDir.open(path) for path in find_runs("sft"))
    pairs = [{"prompt": f"{n} seen", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    beside = f"adapter.beside=[{{name: sft, source: {sft.adapter_dir}}}]"
    start = f"adapter={{init_from: {sft.adapter_dir}}}"
    method = "method={kind: dpo, reference_adapter: sft}"
    assert gym(["train", "run.yaml", start, beside, method, "--quiet"]) == 0
    (run,) = (RunDir.open(path) for path in find_runs("runs"))
    first = sft.adapter_dir / "adapter_model.safetensors"
    kept = run.named_adapter_dir("sft")
    assert (kept / "adapter_model.safetensors").read_bytes() == first.read_bytes()
    assert not any(path.is_dir() for path in run.adapter_dir.iterdir())
    assert (run.adapter_dir / "adapter_model.safetensors").read_bytes() != first.read_bytes()

    from gym_serve.models import load_model, resolve

    def plain(folder: Path, adapter: Path | None) -> torch.Tensor:
        model = load_model(resolve(str(folder)), dtype="float32")
        return _logits(load_adapter(model, adapter) if adapter else model)

    for name, folder in (("default", run.adapter_dir), ("sft", kept)):
        assert gym(["export", str(run.path), "--adapter", name, "--merge", f"merged-{name}"]) == 0
        assert torch.allclose(plain(tmp_path / f"merged-{name}", None), plain(tmp_path / "tiny", folder), atol=1e-4)
    capsys.readouterr()
    assert gym(["export", str(run.path), "--adapter", "stf", "--merge", "x"]) == 2
    said = capsys.readouterr().err
    assert "this run has no adapter stf" in said
    assert "it has default, sft" in said
