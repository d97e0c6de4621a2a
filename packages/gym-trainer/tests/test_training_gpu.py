"""Guards, on a real CUDA device: whole steps of the loop learn there as elsewhere. Run by `pytest -m gpu`.

In fp16 with a loss scaler, on quantised bases, with optimizers of bitsandbytes, and under every preference method.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import losses
from known import VOCABULARY_SIZE, build_preference, label_store, pair_store
from peft import LoraConfig, get_peft_model
from tiny_folder import write_tiny_folder
from tiny_rows import tiny_model, tiny_store
from transformers import LlamaConfig, LlamaForCausalLM

from gym_sdk.events import EventWriter
from gym_sdk.spec import Cpo, Dpo, Kto, Orpo, RunSpec, Simpo, spec_from_data
from gym_serve.models import load_model, resolve
from gym_trainer.adapters import attach
from gym_trainer.fast import attention
from gym_trainer.fast.attention import PER_DOCUMENT, VARLEN, attention_of
from gym_trainer.fast.fused import layer as fused_layer
from gym_trainer.fast.fused.apply import fused_layers
from gym_trainer.loop.batch import Layout, StoreRows
from gym_trainer.loop.dataset import StepDataset
from gym_trainer.loop.fit import FitResult, FitSettings, fit
from gym_trainer.loop.forward import ForwardModel
from gym_trainer.loop.step import StepRunner
from gym_trainer.loop.trainer import GymTrainer
from gym_trainer.objectives.base import Start
from gym_trainer.objectives.reference import AdapterDisabled, FrozenCopy
from gym_trainer.objectives.sft import SftObjective

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
STEPS = 8


def _spec(**sections: Any) -> RunSpec:
    train = {"max_steps": STEPS, "batch_size": 16, "learning_rate": 5e-3, "schedule": "constant"}
    values: dict[str, Any] = {
        "model": {"source": "tiny"},
        "data": {"train": [{"source": "rows.jsonl"}]},
        "adapter": {"kind": "lora", "rank": 8},
        "train": train | sections.pop("train", {}),
    }
    return spec_from_data(values | sections)


def _fit(run_path: Path, model: Any, spec: RunSpec, dtype: torch.dtype, **settings: Any) -> FitResult:
    (run_path / "checkpoints").mkdir(parents=True)
    values: dict[str, Any] = {
        "device": "cuda",
        "dtype": dtype,
        "attention": attention.choose(model.config, "cuda", dtype),
        "packed": True,
        "micro_batch_tokens": 200,
    }
    with EventWriter(run_path / "events.jsonl") as events:
        return fit(
            attach(model, spec.adapter, seed=0).model,
            spec,
            FitSettings(**(values | settings)),
            SftObjective(),
            train_rows=StoreRows(tiny_store(16)),  # type: ignore[arg-type]
            eval_rows=None,
            run_path=run_path,
            events=events,
        )


def _course(run_path: Path) -> list[float]:
    return [values[-1] for _, values in sorted(losses(run_path).items())]


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_with_a_loss_scaler_learns_as_float32_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    scales: list[float] = []
    clip = GymTrainer._clip_grad_norm

    def watched(self: GymTrainer, model: Any) -> Any:
        if self.accelerator.scaler is not None:
            scales.append(self.accelerator.scaler.get_scale())
        return clip(self, model)

    monkeypatch.setattr(GymTrainer, "_clip_grad_norm", watched)
    courses = []
    for name, dtype in (("half", torch.float16), ("single", torch.float32)):
        model = tiny_model(dtype=dtype, **WIDE).cuda()
        fast = {"fused": fused and name == "half", "recompute_layers": int(fused)}
        _fit(tmp_path / name, model, _spec(), dtype, **fast)
        courses.append(_course(tmp_path / name))
    half, single = courses
    assert len(scales) == STEPS
    assert min(scales) > 1
    assert half == pytest.approx(single, rel=0.03)
    assert half[-1] < 0.95 * half[0]


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"])
def test_optimizers_of_bitsandbytes_learn_as_adamw_does(tmp_path: Path, optimizer: str) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    courses = []
    for name in ("adamw", optimizer):
        model = tiny_model(dtype=torch.bfloat16, **WIDE).cuda()
        _fit(tmp_path / name, model, _spec(train={"optimizer": name}), torch.bfloat16, fused=True)
        courses.append(_course(tmp_path / name))
    plain, quantised = courses
    assert quantised == pytest.approx(plain, rel=0.03)
    assert quantised[-1] < 0.95 * quantised[0]


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_qlora_learns_on_the_card(tmp_path: Path, quantization: Any) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    resolved = resolve(str(write_tiny_folder(tmp_path / "model", **WIDE)))
    courses = []
    for kind in ("none", quantization):
        model = load_model(resolved, dtype="bfloat16", device="cuda", quantization=kind)
        _fit(tmp_path / kind, model, _spec(model={"source": "m", "quantization": kind}), torch.bfloat16)
        courses.append(_course(tmp_path / kind))
    plain, quantised = courses
    assert quantised != plain
    assert quantised == pytest.approx(plain, rel=0.05)
    assert quantised[-1] < 0.97 * quantised[0]


METHODS = [Dpo(beta=0.5), Dpo(beta=0.5, loss="ipo"), Kto(beta=0.5), Orpo(), Simpo(), Cpo()]


@pytest.mark.parametrize("layout", ["packed", "shared"])
@pytest.mark.parametrize("frozen_copy", [False, True], ids=["adapter off", "frozen copy"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.kind} {getattr(method, 'loss', '')}".strip())
def test_preference_methods_through_fused_layers_equal_the_plain_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any, frozen_copy: bool, layout: Layout
) -> None:
    """A plain model's pairs are packed one document after another; fused, their prompts may stand once."""
    if layout == "shared" and method.kind == "kto":
        pytest.skip("has no pairs")
    if frozen_copy and method.kind not in ("dpo", "kto"):
        pytest.skip("has no reference")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY_SIZE, num_hidden_layers=3, pad_token_id=0, head_dim=32, **WIDE)
    with torch.device("cuda"):
        causal = LlamaForCausalLM(config).to(torch.bfloat16)
        model = get_peft_model(causal, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")).train()
    store = label_store(12) if method.kind == "kto" else pair_store(12)
    served: list[bool] = []
    forward = fused_layer._FusedLayer.forward

    def counted(ctx: Any, x: torch.Tensor, call: Any, *trained: torch.Tensor) -> torch.Tensor:
        served.append(call.adapted)
        return forward(ctx, x, call, *trained)

    monkeypatch.setattr(fused_layer._FusedLayer, "forward", staticmethod(counted))

    def run(name: str, *, fused: bool) -> tuple[float, float, torch.Tensor]:
        objective = build_preference(method, FrozenCopy() if frozen_copy else AdapterDisabled())
        runner = StepRunner(
            objective, micro_batch_tokens=150, layout=layout if fused else "packed", device=torch.device("cuda")
        )
        (tmp_path / name).mkdir()
        with ExitStack() as stack:
            stack.enter_context(attention_of(causal, VARLEN if fused else PER_DOCUMENT))
            if fused:
                stack.enter_context(fused_layers(model, 1))
                for layer in (layer.__dict__["forward"].__self__ for layer in causal.model.layers):
                    monkeypatch.setattr(layer, "own_forward", _never)
            served.clear()
            start = Start(
                model=ForwardModel(model),
                runner=runner,
                settings=None,  # type: ignore[arg-type]
                run_path=tmp_path / name,
                events=stack.enter_context(EventWriter(tmp_path / name / "events.jsonl")),
                stack=stack,
            )
            (rows,) = objective.start(start, [objective.rows(store)])  # type: ignore[arg-type]
            step = StepDataset(rows, batch_size=12, seed=0)[0]
            first = runner.run(start.model, step, backward=lambda loss: loss.backward()).loss
            model.zero_grad()
            _move(model)
            second = runner.run(start.model, step, backward=lambda loss: loss.backward()).loss
            gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
            model.zero_grad()
            _move(model, back=True)
        return first, second, gradient

    plain, fused = run("plain", fused=False), run("fused", fused=True)
    assert served
    if method.kind in ("dpo", "kto") and not frozen_copy:
        assert set(served) == {True, False}  # the reference goes through fused layers, too
    if method.kind == "dpo" and method.loss == "sigmoid":
        assert fused[0] == pytest.approx(math.log(2), rel=1e-12)  # an untrained policy is its reference to the bit
    assert fused[0] == pytest.approx(plain[0], rel=0.02)
    assert fused[1] == pytest.approx(plain[1], rel=0.03)
    error = float((fused[2] - plain[2]).norm() / plain[2].norm())
    assert error < 0.08  # two bfloat16 backward passes, each rounded its own way


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a layer's own forward was used")


@torch.no_grad()
def _move(model: Any, *, back: bool = False) -> None:
    """As training would: B away from zero."""
    generator = torch.Generator("cuda").manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            drawn = torch.randn(parameter.shape, generator=generator, device="cuda", dtype=parameter.dtype)
            parameter.copy_(torch.zeros_like(parameter) if back else drawn * 0.02)
