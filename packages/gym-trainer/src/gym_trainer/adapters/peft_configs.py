"""The section in peft's own words, checked against the model's layers. What an adapter computes is peft's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gym_sdk.errors import ModelError
from gym_sdk.spec.adapter import AdapterSpec, Ia3Adapter, LoraAdapter, OftAdapter, VeraAdapter
from gym_serve.models.direct_weights import experts_are_read
from gym_serve.models.load import SCORE_HEAD
from gym_trainer.adapters.experts import fused_expert_weights
from gym_trainer.adapters.targets import (
    linear_layers,
    narrower,
    not_plainly_linear,
    renamed_by_peft,
    size_of,
    target_layers,
    without_effect,
)

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

# loftq starts from the default and is filled in from the unquantized weights (`attach`).
_INIT: dict[str, Any] = {"default": True, "pissa": "pissa", "olora": "olora", "eva": "eva", "loftq": True}


def peft_config(model: PreTrainedModel, adapter: AdapterSpec, *, seed: int, new_token_ids: tuple[int, ...] = ()) -> Any:
    """The configuration that `get_peft_model` takes.

    Raises:
        ModelError: targets that match nothing, sizes that do not fit a layer, or new tokens beside an adapter that
            cannot train them.
    """
    if isinstance(adapter, LoraAdapter):
        return _lora(model, adapter, new_token_ids)
    if new_token_ids:
        raise ModelError(
            f"model.new_tokens: an adapter of kind {adapter.kind} cannot train new embedding rows",
            hint="use adapter.kind lora, freeze or full",
        )
    if isinstance(adapter, OftAdapter):
        return _oft(model, adapter)
    if isinstance(adapter, VeraAdapter):
        return _vera(model, adapter, seed)
    assert isinstance(adapter, Ia3Adapter)
    return _ia3(model, adapter)


def left_out_of_all_linear(model: PreTrainedModel, adapter: LoraAdapter) -> list[str]:
    """What `all-linear` leaves out beside the head, by name endings and names: layers beside which an update would have
    no effect, and those narrower than the rank."""
    if adapter.targets != "all-linear":
        return []
    return [*_never_adapted(model), *narrower(target_layers(model, adapter.targets), adapter.rank)]


def _never_adapted(model: PreTrainedModel) -> list[str]:
    """Name endings that this model has and `all-linear` never means."""
    endings = {name.rpartition(".")[2] for name in linear_layers(model)}
    return sorted((without_effect(model) & endings) | not_plainly_linear(model))


def require_modules(model: PreTrainedModel, names: list[str]) -> list[nn.Module]:
    """The modules whose names end in one of these.

    Raises:
        ModelError: an ending that matches nothing.
    """
    found: list[nn.Module] = []
    for ending in names:
        matching = [m for name, m in model.named_modules() if name == ending or name.endswith(f".{ending}")]
        if not matching:
            endings = sorted({name.rpartition(".")[2] for name, _ in model.named_modules() if name})
            known = ", ".join(ending for ending in endings if not ending.isdigit())
            raise ModelError(f"adapter.modules_to_save: {ending} matches no module", hint=f"names end in {known}")
        found += matching
    return found


def _common(model: PreTrainedModel, adapter: LoraAdapter | OftAdapter | VeraAdapter | Ia3Adapter) -> dict[str, Any]:
    require_modules(model, adapter.modules_to_save)
    targets = adapter.targets
    if targets == "all-linear" and _never_adapted(model):
        targets = sorted(target_layers(model, targets))
    return {
        "target_modules": targets,
        "modules_to_save": adapter.modules_to_save or None,
        # peft trains the new head of a sequence classifier whole, and keeps it with the adapter
        "task_type": "SEQ_CLS" if hasattr(model, SCORE_HEAD) else "CAUSAL_LM",
    }


def _lora(model: PreTrainedModel, adapter: LoraAdapter, new_token_ids: tuple[int, ...]) -> Any:
    from peft import LoraConfig

    layers = target_layers(model, adapter.targets)
    narrow = narrower(layers, adapter.rank)
    if narrow and (adapter.targets != "all-linear" or len(narrow) == len(layers)):
        smallest = min(layers, key=lambda name: min(size_of(layers[name])))
        least = min(size_of(layers[smallest]))
        raise ModelError(
            f"adapter.rank is {adapter.rank}, but {smallest} is only {' x '.join(map(str, size_of(layers[smallest])))}",
            hint=f"use a rank of at most {least}, or other adapter.targets",
        )
    if adapter.experts == "adapt" and experts_are_read(model.config.model_type):
        raise ModelError(
            f"adapter.experts: the code of {model.config.model_type} reads its experts' weights past peft's update",
            hint="leave it at frozen, or train all weights with adapter.kind=full",
        )
    experts = list(fused_expert_weights(model)) if adapter.experts == "adapt" else []
    options = _common(model, adapter)
    options["target_modules"] = adapter.targets
    options["exclude_modules"] = left_out_of_all_linear(model, adapter) or None
    if renamed := renamed_by_peft(model):
        # Every target by its full name, and the weights of those that peft would take for experts as parameters.
        chosen = [name for name in layers if name not in narrow]
        options["exclude_modules"] = None
        options["target_modules"] = [name for name in chosen if name.rpartition(".")[2] not in renamed]
        as_parameters = [name for name in chosen if name.rpartition(".")[2] in renamed and _is_plain(layers[name])]
        experts += [f"{name}.weight" for name in as_parameters]
        if as_parameters and (adapter.dropout or adapter.dora or adapter.init in ("pissa", "olora")):
            raise ModelError(
                f"peft adapts {as_parameters[0]} of this architecture as a parameter, without dropout, dora and init",
                hint="use the defaults of these, or adapter.targets=[q_proj, k_proj, v_proj, o_proj]",
            )
    return LoraConfig(
        **options,
        r=adapter.rank,
        lora_alpha=adapter.alpha if adapter.alpha is not None else 2 * adapter.rank,  # pyright: ignore[reportArgumentType] - peft takes any number
        lora_dropout=adapter.dropout,
        init_lora_weights=_INIT[adapter.init],
        use_rslora=adapter.scaling == "rslora",
        use_dora=adapter.dora,
        target_parameters=experts or None,
        trainable_token_indices=_token_indices(model, new_token_ids) or None,
        ensure_weight_tying=bool(new_token_ids),  # else a tied head keeps the rows that the embeddings leave behind
    )


def _is_plain(layer: nn.Module) -> bool:
    from torch import nn

    return type(layer) is nn.Linear  # the weight of a quantized layer cannot be adapted as a parameter


def _token_indices(model: PreTrainedModel, ids: tuple[int, ...]) -> dict[str, list[int]]:
    """The trained rows of the embeddings, and of an output head with weights of its own."""
    if not ids:
        return {}
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    modules = [embeddings] if head is None or head.weight is embeddings.weight else [embeddings, head]
    return {name: list(ids) for name, module in model.named_modules() if any(module is m for m in modules)}


def _oft(model: PreTrainedModel, adapter: OftAdapter) -> Any:
    from peft import OFTConfig

    for name, layer in target_layers(model, adapter.targets).items():
        if size_of(layer)[0] % adapter.block_size:
            raise ModelError(
                f"adapter.block_size is {adapter.block_size}, which does not divide the {size_of(layer)[0]} inputs of "
                f"{name}",
                hint="use a divisor of every target's inputs, or other adapter.targets",
            )
    return OFTConfig(**_common(model, adapter), oft_block_size=adapter.block_size, r=0, module_dropout=adapter.dropout)


def _vera(model: PreTrainedModel, adapter: VeraAdapter, seed: int) -> Any:
    from peft import VeraConfig

    target_layers(model, adapter.targets)
    # The random matrices go into the file: torch may draw others in a later version.
    return VeraConfig(
        **_common(model, adapter),
        r=adapter.rank,
        vera_dropout=adapter.dropout,
        projection_prng_key=seed,
        save_projection=True,
    )


def _ia3(model: PreTrainedModel, adapter: Ia3Adapter) -> Any:
    from peft import IA3Config

    layers = target_layers(model, adapter.targets)
    # peft wants the feed-forward layers to be among the targets, by the same names
    names = sorted(layers) if isinstance(adapter.targets, str) else adapter.targets
    feedforward = [name for name in names if name.rpartition(".")[2] in adapter.feedforward]
    options = _common(model, adapter)
    options["target_modules"] = names
    return IA3Config(**options, feedforward_modules=feedforward)
