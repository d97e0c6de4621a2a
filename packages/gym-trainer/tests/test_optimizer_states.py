"""Guards the plan's optimizer memory: it is what the real optimizer holds after its first step."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tiny_rows import tiny_model
from torch import nn
from transformers import LlamaConfig, Trainer, TrainingArguments

from gym_sdk.spec import RunSpec, TrainSpec
from gym_trainer.adapters import attach
from gym_trainer.loop.optimizers import _NEEDS, optimizer_arguments, optimizer_builder  # pyright: ignore[reportPrivateUsage]
from gym_trainer.planning import DEVICES, plan
from gym_trainer.planning.estimate import optimizer_work
from gym_trainer.planning.memory import StaticMemory
from gym_trainer.planning.optimizer_states import state_sizes

OPTIMIZERS = get_args(TrainSpec.model_fields["optimizer"].annotation)
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "vocab_size": 320}
SMALL: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
SHARED = ("qmap1", "qmap2")
"""bitsandbytes' tables of values, which all weights share."""


@pytest.fixture(autouse=True)
def _no_earlier_overrides() -> None:
    """bitsandbytes remembers by number which weights of an earlier optimizer were to have 32 bits."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        from bitsandbytes.optim.optimizer import GlobalOptimManager

        GlobalOptimManager.get_instance().initialize()


def spec_of(optimizer: str, **sections: Any) -> RunSpec:
    train = {"optimizer": optimizer} | ({"schedule": "constant"} if optimizer.startswith("schedule_free") else {})
    values = {"model": {"source": "m"}, "data": {"train": [{"source": "d"}]}, "train": train}
    return RunSpec.model_validate(values | sections)


def one_step(spec: RunSpec, model: nn.Module, folder: Path) -> torch.optim.Optimizer:
    """The optimizer that a run builds, after a step."""
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **optimizer_arguments(spec.train))
    build = optimizer_builder(spec.train, spec.adapter)
    optimizer = build(model, args) if build else Trainer(model=model, args=args).create_optimizer()  # pyright: ignore
    model.train()
    if spec.train.optimizer.startswith("schedule_free"):
        optimizer.train()  # pyright: ignore
    model(input_ids=torch.arange(40)[None]).logits.float().square().mean().backward()
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its update
        optimizer.step()
    return optimizer


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    parts: list[torch.optim.Optimizer] = getattr(optimizer, "_parts", [getattr(optimizer, "optimizer", optimizer)])
    return sum(
        tensor.nbytes
        for part in parts
        for state in part.state.values()
        for name, value in state.items()
        if name not in SHARED
        for tensor in plain_tensors(value)
        if tensor.ndim > 0  # a step's number, a norm
    )


def plain_tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors that a state is made of, its own projection and the parts of a quantized tensor included."""
    if hasattr(value, "__tensor_flatten__"):
        yield from (getattr(value, name) for name in value.__tensor_flatten__()[0])  # pyright: ignore
    elif isinstance(value, torch.Tensor):
        yield value
    elif hasattr(value, "ortho_matrix"):
        yield value.ortho_matrix  # pyright: ignore


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in OPTIMIZERS]
    + [(name, torch.bfloat16) for name in ("adamw", "adafactor", "muon", "schedule_free_adamw", "adamw_8bit")],
)
def test_the_plan_charges_what_the_optimizer_holds_after_a_step(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    for package, beginnings in _NEEDS.items():
        if name.startswith(beginnings) and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    spec = spec_of(name, adapter={"kind": "full"})
    model = attach(tiny_model(dtype=dtype, **SIZES, **SMALL), spec.adapter, seed=0).model
    held = held_bytes(one_step(spec, model, tmp_path))
    assert sum(state_sizes(name, model)) == held


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "muon"])
def test_the_states_of_an_adapter_are_counted_like_those_of_a_model(name: str, tmp_path: Path) -> None:
    spec = spec_of(name, adapter={"kind": "lora", "rank": 16})
    model = attach(tiny_model(**SIZES, **SMALL), spec.adapter, seed=0).model
    assert sum(state_sizes(name, model)) == held_bytes(one_step(spec, model, tmp_path))


@pytest.mark.parametrize("adapter", [{"kind": "full"}, {"kind": "freeze", "num_layers": 2}, {"kind": "lora"}])
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_whole_plan_holds_the_states_of_the_trained_layers(name: str, adapter: Any) -> None:
    config = LlamaConfig(**SIZES, **SMALL, pad_token_id=0)
    spec = spec_of(name, adapter=adapter)
    planned = plan(spec, config, DEVICES["l4"], compare=False).memory.optimizer
    model = attach(tiny_model(dtype=torch.bfloat16, **SIZES, **SMALL), spec.adapter, seed=0).model
    expected = sum(-(-size // 512) * 512 for size in state_sizes(name, model))
    assert planned == pytest.approx(expected, rel=1e-3)


def test_the_time_of_an_update_follows_what_the_optimizer_keeps() -> None:
    def moved(states: int) -> float:
        static = StaticMemory(frozen_weights=0, trained_weights=100, gradients=100, optimizer=states)
        return optimizer_work(static, DEVICES["l4"]).num_bytes

    assert moved(200) == 1000  # AdamW: weight, gradient and two states read, three of them written, clipping's three
    assert moved(100) == 800  # one state, such as of SGD with momentum
    assert moved(50) == 700  # two states of 8 bits beside float32
    assert moved(0) == 600


def test_paged_states_do_not_decide_whether_a_card_is_large_enough() -> None:
    model = tiny_model(hidden_size=512, intermediate_size=512)
    on_card, on_processor = (sum(state_sizes("paged_adamw_32bit", model, on_cuda=cuda)) for cuda in (True, False))
    large = sum(p.numel() for p in model.parameters() if p.numel() >= 100_000)
    assert large > 0
    assert on_processor - on_card == 8 * large
