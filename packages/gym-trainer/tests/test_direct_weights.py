"""Guards layers that a model's own code never calls: neither quantized nor adapted, and refused when named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gym_sdk.errors import ModelError
from gym_sdk.spec.adapter import LoraAdapter, VeraAdapter
from gym_serve.models import load_model, resolve
from gym_serve.models.direct_weights import kept_unquantized, never_called
from gym_trainer.adapters import attach
from gym_trainer.adapters import targets as target_names
from gym_trainer.matrix.architectures import Architecture
from gym_trainer.matrix.checks import check_architecture
from gym_trainer.matrix.tiny import write_tiny_model


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture = Architecture(model_type="mamba", class_name="MambaForCausalLM", group="decoder")
    return write_tiny_model(architecture, tmp_path_factory.mktemp("mamba"))


@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
def test_every_adapted_layer_of_mamba_learns_whatever_its_base_is_held_in(quantization: str, mamba: Path) -> None:
    if quantization != "none":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = load_model(resolve(str(mamba)), dtype="float32", quantization=quantization)  # pyright: ignore
    kinds = {name.rpartition(".")[2]: type(m).__name__ for name, m in model.named_modules() if "proj" in name}
    quantized = {"none": "Linear", "nf4": "Linear4bit", "int8": "Linear8bitLt"}[quantization]
    assert kinds == {"in_proj": quantized, "x_proj": quantized, "dt_proj": "Linear", "out_proj": quantized}
    assert type(model.get_output_embeddings()).__name__ == "Linear"
    trained = attach(model, LoraAdapter(rank=4), seed=0).model.train()
    trained(input_ids=torch.arange(3, 23)[None]).logits.square().sum().backward()
    gradients = {name: p.grad for name, p in trained.named_parameters() if "lora_B" in name}
    assert {name.split(".")[-4] for name in gradients} == {"in_proj", "x_proj"}
    assert all(gradient is not None and bool(gradient.any()) for gradient in gradients.values())


def test_a_layer_whose_adapter_would_never_be_computed_is_refused_by_name(mamba: Path) -> None:
    model = load_model(resolve(str(mamba)), dtype="float32")
    for targets in (["in_proj", "dt_proj"], r".*mixer\.out_proj"):
        with pytest.raises(ModelError, match="would never be computed") as error:
            attach(model, LoraAdapter(rank=4, targets=targets), seed=0)
        assert error.value.hint == "leave it out; adapter.targets=all-linear does"


def test_other_kinds_of_adapters_leave_it_out_too(mamba: Path) -> None:
    model = load_model(resolve(str(mamba)), dtype="float32")
    trained = attach(model, VeraAdapter(rank=8), seed=0).model
    adapted = {name.split(".")[-3] for name, _ in trained.named_parameters() if "vera_lambda_d" in name}
    assert adapted == {"in_proj", "x_proj"}


def test_a_layer_that_is_called_and_also_read_is_adapted_but_not_quantized() -> None:
    assert never_called("gemma3n_text") == {"correction_coefs"}
    assert kept_unquantized("gemma3n_text") == {"prediction_coefs", "correction_coefs"}
    assert kept_unquantized("llama") == never_called("llama") == frozenset()


def test_the_matrix_notices_a_layer_that_is_read_instead_of_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(model_type: str) -> frozenset[str]:
        return frozenset()

    monkeypatch.setattr(target_names, "never_called", nothing)
    architecture = Architecture(model_type="mamba", class_name="MambaForCausalLM", group="decoder")
    lora = check_architecture(architecture, only=("load", "packing", "lora")).checks["lora"]
    assert lora.status == "fail"
    assert lora.note == (
        "adapters beside 4 layers get no gradient, and the layers' own weights do, such as "
        "backbone.layers.0.mixer.dt_proj"
    )


def test_a_linear_layer_in_other_words_is_adapted_and_a_router_is_not() -> None:
    from transformers.models.falcon.modeling_falcon import FalconLinear
    from transformers.models.llama4.modeling_llama4 import Llama4Router

    falcon = Architecture(model_type="falcon", class_name="FalconForCausalLM", group="decoder")
    model = torch.nn.ModuleDict({"dense": FalconLinear(4, 6), "plain": torch.nn.Linear(4, 6)})
    router = Llama4Router.__new__(Llama4Router)
    torch.nn.Linear.__init__(router, 4, 2, bias=False)
    model["router"] = router
    assert sorted(target_names.linear_layers(model)) == ["dense", "plain"]  # pyright: ignore[reportArgumentType]
    assert target_names.not_plainly_linear(model) == {"router"}  # pyright: ignore[reportArgumentType]
    lora = check_architecture(falcon, only=("load", "packing", "lora")).checks["lora"]
    assert lora.status == "pass", lora.note
