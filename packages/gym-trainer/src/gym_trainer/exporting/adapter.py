"""An adapter in peft's layout, against the untouched base.

PiSSA and OLoRA start from directions of the weight, which peft takes out of the base: W0 = W' + s B0 A0. Such an
adapter only fits that changed base. What was learned is s (B A - B0 A0), which is itself a low-rank update of the
untouched base, of twice the rank: [B, -B0] and [A; A0]. That form loads everywhere; DoRA's magnitudes stay as they are,
since the weight that they rescale is the same in both forms.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gym_sdk.errors import RunFailed
from gym_sdk.rundir import RunDir
from gym_sdk.spec.adapter import AdapterSpec, adapters_beside
from gym_trainer.exporting.folder import Base, complete_or_absent, write_companions

_A, _B = ".lora_A.", ".lora_B."


def trained_weights(model: Any) -> dict[str, Tensor]:
    """A copy of the weights that training changes, on the host: taken before, it shows what training did."""
    return {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters() if p.requires_grad}


def save_adapter(
    model: Any, folder: Path, base: Base, *, initial: dict[str, Tensor], metadata: dict[str, Any], replace: bool = False
) -> None:
    """Write the active adapter of a peft model.

    Raises:
        RunFailed: training changed no weight of it.
    """
    require_change(model, initial)
    with complete_or_absent(folder, replace=replace) as staged:
        config = model.peft_config[model.active_adapter]
        # peft's loaders look the base up under this name; a model that is not on a hub is a folder on this machine.
        resolved = base.resolved
        config.base_model_name_or_path = resolved.source if resolved.kind == "hub" else str(resolved.folder)
        config.revision = resolved.revision
        start = config.init_lora_weights if config.peft_type == "LORA" else True
        if start in ("pissa", "olora"):
            _save_against_untouched_base(model, staged, initial)
        else:
            if start == "eva":
                # It left the base as it was: the weights say everything.
                config.init_lora_weights, config.eva_config = True, None
            # An adapted output head does not change the embeddings, which peft would add as a second copy.
            model.save_pretrained(
                str(staged),
                safe_serialization=True,
                save_embedding_layers=False,
                selected_adapters=[model.active_adapter],
            )
        (staged / "README.md").unlink(missing_ok=True)
        write_companions(staged, base, model.get_base_model(), metadata)


def keep_beside(run: RunDir, adapter: AdapterSpec) -> list[Path]:
    """Copy the frozen adapters of a run into its folder, byte for byte, each under its name."""
    folders: list[Path] = []
    for other in adapters_beside(adapter):
        folder = run.named_adapter_dir(other.name)
        with complete_or_absent(folder, replace=True) as staged:
            shutil.copytree(other.source, staged, dirs_exist_ok=True)
        folders.append(folder)
    return folders


def require_change(model: Any, initial: dict[str, Tensor]) -> None:
    """Raise RunFailed when every trained weight still has its first value, or every update is zero."""
    now = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    same = all(torch.equal(now[name].cpu(), initial[name]) for name in now)
    updates = [value for name, value in now.items() if _B in name]
    if same or (updates and all(not bool(value.any()) for value in updates) and not _has_magnitudes(now)):
        raise RunFailed(
            "training changed no weight: the result would be the base model",
            hint="is train.learning_rate far too small, or is there a single step of warm-up?",
        )


def _has_magnitudes(weights: dict[str, Tensor]) -> bool:
    return any("lora_magnitude_vector" in name for name in weights)


def _save_against_untouched_base(model: Any, staged: Path, initial: dict[str, Tensor]) -> None:
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    name = model.active_adapter
    before = get_peft_model_state_dict(model, state_dict=dict(initial), adapter_name=name, save_embedding_layers=False)
    after = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    state: dict[str, Tensor] = {}
    for key, value in after.items():
        now, first = value.detach().cpu(), before.get(key)
        if _A in key and first is not None:
            now = torch.cat([now, first])
        elif _B in key and first is not None:
            now = torch.cat([now, -first], dim=1)
        state[key] = now.contiguous()
    config = model.peft_config[name]
    config_dict = config.to_dict()
    doubled = type(config)(**{k: v for k, v in config_dict.items() if k in type(config).__dataclass_fields__})
    doubled.init_lora_weights = True
    doubled.r = 2 * config.r
    # The factor of the update stays: alpha / r, or alpha / sqrt(r) under rsLoRA.
    doubled.lora_alpha = config.lora_alpha * (math.sqrt(2) if config.use_rslora else 2)
    doubled.inference_mode = True
    doubled.save_pretrained(str(staged))
    save_file(state, str(staged / "adapter_model.safetensors"), metadata={"format": "pt"})
