"""Which layers an adapter goes beside."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from gym_sdk.errors import ModelError
from gym_serve.models.direct_weights import never_called
from gym_serve.models.load import SCORE_HEAD

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def target_layers(model: PreTrainedModel, targets: str | list[str]) -> dict[str, nn.Module]:
    """The linear layers that `adapter.targets` names, by name.

    Raises:
        ModelError: a target that matches nothing, with the names there are, or a layer beside which an adapter would
            have no effect.
    """
    linear = linear_layers(model)
    never_computed = without_effect(model)
    if targets == "all-linear":
        head = model.get_output_embeddings() or getattr(model, SCORE_HEAD, None)
        return {
            name: module
            for name, module in linear.items()
            if module is not head and name.rpartition(".")[2] not in never_computed
        }
    found = _named(linear, targets)
    for name in found:
        if name.rpartition(".")[2] in never_computed:
            raise ModelError(
                f"adapter.targets: an adapter beside {name} would never be computed: this model's own code reads "
                "the layer's weight instead of calling the layer",
                hint="leave it out; adapter.targets=all-linear does",
            )
    return found


def _named(linear: dict[str, nn.Module], targets: str | list[str]) -> dict[str, nn.Module]:
    endings = sorted({name.rpartition(".")[2] for name in linear})
    hint = f"this model's linear layers end in {', '.join(endings)}"
    if isinstance(targets, list):
        for target in targets:
            if not any(name == target or name.endswith(f".{target}") for name in linear):
                raise ModelError(f"adapter.targets: {target} matches no linear layer", hint=hint)
        return {n: m for n, m in linear.items() if any(n == t or n.endswith(f".{t}") for t in targets)}
    try:
        found = {name: module for name, module in linear.items() if re.fullmatch(targets, name)}
    except re.error as error:
        raise ModelError(f"adapter.targets is not a regular expression: {error}", hint=hint) from None
    if not found:
        raise ModelError(f"adapter.targets: no linear layer's full name matches {targets}", hint=hint)
    return found


def without_effect(model: PreTrainedModel) -> set[str]:
    """Endings of names of layers whose weight the model's own code reads, so that an adapter beside them is never
    computed: always (Mamba's `dt_proj`), or in its fused kernels (`out_proj`, which peft refuses)."""
    return _refused_by_peft(model) | never_called(model.config.model_type)


def _refused_by_peft(model: PreTrainedModel) -> set[str]:
    """Names that peft refuses in this model, because Mamba's fused kernels read their weights (peft issue 2391)."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba  # pyright: ignore[reportPrivateUsage]

    refused: set[str] = set()
    for name in {name.rpartition(".")[2] for name in linear_layers(model)}:
        try:
            _check_lora_target_modules_mamba(LoraConfig(), model, name)
        except ValueError:
            refused.add(name)
    return refused


def renamed_by_peft(model: PreTrainedModel) -> set[str]:
    """Endings of names that peft takes for experts in this architecture, whatever they belong to.

    In transformers 4 the experts of Mixtral and Qwen2-MoE and their kin were linear layers named `gate_proj` and the
    like. peft still reads these endings as the fused experts of today, in `all-linear`, too; but shared experts and
    dense layers have them as well, and would lose their updates without a word.
    """
    from peft.utils import transformers_weight_conversion as conversion

    patterns: dict[str, str] = conversion._MODEL_TO_CONVERSION_PATTERN  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    pattern = patterns.get(model.config.model_type)
    if pattern not in conversion._MOE_FUSED_TARGETS:  # pyright: ignore[reportPrivateUsage]
        return set()
    return set(conversion._MOE_TARGET_MODULE_MAPPING[pattern])  # pyright: ignore[reportPrivateUsage]


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """All linear layers, also quantized ones and GPT-2's transposed ones. `all-linear` leaves the output head out."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not _has_own_forward(module)
    }


def not_plainly_linear(model: PreTrainedModel) -> set[str]:
    """Modules that are linear layers by their class only, such as Llama 4's router, which also chooses experts: an
    update beside what they return has no meaning."""
    from torch import nn

    return {n for n, module in model.named_modules() if isinstance(module, nn.Linear) and _has_own_forward(module)}


def _has_own_forward(module: nn.Module) -> bool:
    kind = type(module)
    is_own = kind.__module__.startswith("transformers.models.") and "forward" in vars(kind)
    return is_own and not _computes_the_product(kind)


@cache
def _computes_the_product(kind: type[nn.Module]) -> bool:
    """Whether a class's own forward is a linear layer's in other words (Falcon's): tried on a small layer."""
    import torch

    plain = torch.nn.Linear(3, 2, device="cpu", dtype=torch.float32)
    x_BI = torch.ones(1, 3, device="cpu", dtype=torch.float32)
    try:
        with torch.no_grad():
            found = kind.forward(plain, x_BI)
            return isinstance(found, torch.Tensor) and torch.allclose(found, plain(x_BI))
    except Exception:  # noqa: BLE001 - it needs what a linear layer does not have, whatever that is
        return False


def size_of(layer: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    if hasattr(layer, "in_features"):
        return int(layer.in_features), int(layer.out_features)
    return int(layer.weight.shape[0]), int(layer.weight.shape[1])


def narrower(layers: dict[str, nn.Module], rank: int) -> list[str]:
    """Layers that an update of this rank could only overfill, such as a projection to a few gates."""
    return [name for name, layer in layers.items() if min(size_of(layer)) < rank]
