"""Freezing and adding what the section says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gym_sdk.errors import ModelError
from gym_sdk.spec.adapter import AdapterSpec, FreezeAdapter, FullAdapter, LoraAdapter
from gym_serve.models.load import SCORE_HEAD
from gym_trainer.adapters.beside import add_beside
from gym_trainer.adapters.experts import frozen_experts_note
from gym_trainer.adapters.init_from import require_same
from gym_trainer.adapters.peft_configs import left_out_of_all_linear, peft_config, require_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class TrainableModel:
    """A model ready to be trained, and what of it is."""

    model: Any
    """The transformers model itself, or a peft model around it."""
    num_trained: int
    num_weights: int
    notes: tuple[str, ...] = ()
    """What a person should know, such as weights that stay frozen."""


def attach(
    model: PreTrainedModel,
    adapter: AdapterSpec,
    *,
    seed: int,
    new_token_ids: tuple[int, ...] = (),
    first_batches: Callable[[], Iterable[dict[str, Any]]] | None = None,
) -> TrainableModel:
    """Freeze and add what the section says.

    `new_token_ids` are rows of the embeddings that are trained beside the adapter. `first_batches` gives a few batches
    of model inputs, for an adapter that starts from what the layers see (`init: eva`).

    Raises:
        ModelError: targets that match no module, a rank larger than a layer, an `init_from` or a `beside` that does
            not fit.
    """
    import torch
    from transformers import set_seed

    set_seed(seed)
    notes: list[str] = []
    if isinstance(adapter, FullAdapter):
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        trained: Any = model
    elif isinstance(adapter, FreezeAdapter):
        trained = _freeze_all_but_last(model, adapter, new_token_ids)
    elif adapter.init_from is not None:
        from gym_serve.models import load_adapter

        trained = load_adapter(model, adapter.init_from, trainable=True)
        require_same(trained.peft_config["default"], adapter, new_token_ids)
    else:
        from peft import get_peft_model

        if isinstance(adapter, LoraAdapter):
            if adapter.experts == "frozen":
                notes += frozen_experts_note(model)
            notes += _left_out_note(model, adapter)
        trained = get_peft_model(model, peft_config(model, adapter, seed=seed, new_token_ids=new_token_ids))
        if isinstance(adapter, LoraAdapter) and adapter.init in ("eva", "loftq"):
            _start(trained, adapter, first_batches)
    num_weights = sum(p.numel() for p in trained.parameters())  # before what stands beside
    add_beside(trained, adapter)
    parameters = list(trained.parameters())
    num_trained = sum(p.numel() for p in parameters if p.requires_grad)
    if num_trained == 0:
        raise ModelError("nothing is trained", hint="see adapter.targets")
    if any(p.dtype == torch.float16 and p.requires_grad for p in parameters):
        # A loss scaler needs float32 weights to scale back to.
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return TrainableModel(
        model=trained,
        num_trained=num_trained,
        num_weights=num_weights - (num_trained if trained is not model else 0),
        notes=tuple(notes),
    )


def _freeze_all_but_last(
    model: PreTrainedModel, adapter: FreezeAdapter, new_token_ids: tuple[int, ...]
) -> PreTrainedModel:
    from gym_trainer.fast.layers import decoder_layers

    layers = decoder_layers(model)
    if not layers:
        raise ModelError("transformers does not mark this model's decoder layers", hint="use another adapter.kind")
    if adapter.num_layers > len(layers):
        raise ModelError(
            f"adapter.num_layers is {adapter.num_layers}, but the model has {len(layers)} layers",
            hint="adapter.kind=full trains all of them",
        )
    model.requires_grad_(False)
    others = require_modules(model, adapter.modules_to_save)
    if new_token_ids:
        head = model.get_output_embeddings()
        others += [model.get_input_embeddings(), *([head] if head is not None else [])]
    if hasattr(model, SCORE_HEAD):
        others.append(getattr(model, SCORE_HEAD))
    for module in [*layers[-adapter.num_layers :], *others]:
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
    return model


def _left_out_note(model: PreTrainedModel, adapter: LoraAdapter) -> list[str]:
    left_out = left_out_of_all_linear(model, adapter)
    if not left_out:
        return []
    return [
        f"adapter.targets=all-linear leaves out {len(left_out)} names, such as {left_out[0]}: an adapter beside "
        f"them would not be computed in this architecture, or they are narrower than rank {adapter.rank}"
    ]


def _start(model: Any, adapter: LoraAdapter, first_batches: Callable[[], Iterable[dict[str, Any]]] | None) -> None:
    """Starting values that need data or the unquantized weights."""
    import torch

    if adapter.init == "eva":
        from peft import initialize_lora_eva_weights

        if first_batches is None:
            raise ModelError(
                "adapter.init is eva, which starts from the first rows, and streamed rows have no number",
                hint="set data.streaming to false, or use another adapter.init",
            )
        with torch.no_grad():
            initialize_lora_eva_weights(model, list(first_batches()), show_progress_bar=False)
        return
    if not torch.cuda.is_available():
        raise ModelError(
            "adapter.init is loftq, which computes on a CUDA device, and there is none", hint="use another adapter.init"
        )
    from peft import replace_lora_weights_loftq

    replace_lora_weights_loftq(model, model_path=model.get_base_model().config.name_or_path)
