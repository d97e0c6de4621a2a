"""What is wrong with an `adapter:` section as far as the model's configuration tells, before any weight is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gym_sdk.errors import ModelError
from gym_sdk.spec.adapter import FreezeAdapter, FullAdapter, LoraAdapter
from gym_trainer.adapters.beside import look_at_beside
from gym_trainer.adapters.init_from import require_same
from gym_trainer.adapters.peft_configs import peft_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from gym_sdk.spec import RunSpec


def check_adapter(
    spec: RunSpec, config: PreTrainedConfig, device: str, *, writes_text: bool, new_token_ids: tuple[int, ...] = ()
) -> None:
    """Find what would end the run once the weights are there. LoRA's targets and rank are the plan's to find.

    `device` is `cpu` or `cuda`; with `writes_text` the model is a causal language model, and not one that scores.

    Raises:
        ModelError: an adapter of another model in `init_from` or `beside`, or one with other settings; sizes that do
            not fit the model's layers; an `init` that computes on a device which is not there.
    """
    adapter = spec.adapter
    if isinstance(adapter, LoraAdapter) and adapter.init == "loftq" and device != "cuda":
        raise ModelError(
            "adapter.init is loftq, which computes on a CUDA device, and there is none",
            hint="use adapter.init=default, or another that gym explain adapter.init lists",
        )
    others = look_at_beside(adapter)
    is_new_lora = isinstance(adapter, LoraAdapter) and adapter.init_from is None
    if isinstance(adapter, FullAdapter) or (is_new_lora and not others):
        return
    import torch
    from peft import PeftConfig

    from gym_serve.models import inspect_adapter
    from gym_serve.models.adapters import check_fits
    from gym_trainer.adapters.attach import attach
    from gym_trainer.planning.workload import meta_model

    # With remote code the modules are known with the weights only.
    model: Any = None if spec.model.trust_remote_code else meta_model(config, torch.float32)
    if model is not None and writes_text:
        for _, info in others:
            check_fits(info, model)
    if isinstance(adapter, FreezeAdapter):
        if model is not None:
            attach(model, adapter, seed=0, new_token_ids=new_token_ids)
    elif adapter.init_from is None:
        if model is not None and not is_new_lora:
            peft_config(model, adapter, seed=0, new_token_ids=new_token_ids)
    else:
        info = inspect_adapter(adapter.init_from)
        if model is not None and writes_text:
            check_fits(info, model)
        require_same(PeftConfig.from_pretrained(adapter.init_from), adapter, new_token_ids)
