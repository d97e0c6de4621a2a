"""Adapters in peft's layout: `adapter_config.json` and `adapter_model.safetensors`, checked before they are used."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_sdk.errors import MissingExtra, ModelError
from gym_serve.models._suggest import nearest
from gym_serve.models.cache import file_sha256
from gym_serve.models.safetensors_header import header_shapes

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True)
class AdapterInfo:
    """An adapter folder that has been looked at, but not loaded."""

    folder: Path
    config: dict[str, Any] = field(repr=False)
    shapes: dict[str, tuple[int, ...]] = field(repr=False)
    """The shape of every stored weight, by its key in the file."""

    @property
    def kind(self) -> str:
        """peft's name in lower case: `lora`, `ia3`, `oft`, `vera`."""
        return str(self.config["peft_type"]).lower()

    @property
    def base(self) -> str | None:
        """The base model that the adapter says it was trained on."""
        value = self.config.get("base_model_name_or_path")
        return value if isinstance(value, str) else None

    @cached_property
    def content_id(self) -> str:
        """A SHA-256 of the weights and the settings: the same adapter has the same id under every name and path."""
        settings = {key: value for key, value in self.config.items() if key != "base_model_name_or_path"}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        digest.update(file_sha256(self.folder / WEIGHTS).encode())
        return f"sha256:{digest.hexdigest()}"

    @cached_property
    def modules(self) -> frozenset[str]:
        """The names, in the base model, of the modules that the weights belong to."""
        return frozenset(_module_of(key) for key in self.shapes if key.startswith(_PREFIX))


def inspect_adapter(folder: Path | str) -> AdapterInfo:
    """Read an adapter's settings and the shapes of its weights, without torch.

    Raises:
        ModelError: not an adapter folder, a pickle file in place of safetensors, or a damaged file.
    """
    folder = Path(folder)
    path = folder / CONFIG
    if not path.is_file():
        raise ModelError(
            f"{folder} has no {CONFIG}",
            hint="an adapter is a folder as peft's save_pretrained writes it; a run's is in its adapter/",
        )
    weights = folder / WEIGHTS
    if not weights.is_file():
        pickled = folder / "adapter_model.bin"
        raise ModelError(
            f"{folder} has no {WEIGHTS}" + (" (only adapter_model.bin, a pickle file)" if pickled.is_file() else ""),
            hint="pickle files can run code when opened; save it again with a current peft"
            if pickled.is_file()
            else None,
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        shapes = header_shapes(weights)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder} is damaged: {error}", hint="copy or download it again") from error
    if not isinstance(config, dict) or not isinstance(config.get("peft_type"), str):
        raise ModelError(f"{path} does not say what kind of adapter it is (peft_type)")
    return AdapterInfo(folder=folder, config=config, shapes=shapes)


def load_adapter(
    model: PreTrainedModel, folder: Path | str, *, name: str = "default", trainable: bool = False
) -> PeftModel:
    """The model with the adapter of `folder` on it, as a peft model in evaluation mode.

    Raises:
        ModelError: as `inspect_adapter`; or the adapter was made for another architecture: its weights belong to
            modules that the model does not have, or have other shapes.
        MissingExtra: peft is not installed.
    """
    info = inspect_adapter(folder)
    try:
        from peft import PeftModel
    except ImportError as error:
        raise MissingExtra("loading an adapter", package="gym-serve", extra="torch") from error
    rows = [index for indices in (info.config.get("trainable_token_indices") or {}).values() for index in indices]
    if rows:  # tokens that training has added to the vocabulary
        grow_embeddings(model, max(rows) + 1)
    check_fits(info, model)
    loaded = PeftModel.from_pretrained(
        model, str(info.folder), adapter_name=name, is_trainable=trainable, use_safetensors=True
    )
    _require_loaded(loaded, info, name)
    if (info.folder / "generation_config.json").is_file():  # how the adapter ends its turns, not how its base did
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(info.folder)  # peft passes it on
    return loaded.train(trainable)


def add_frozen(model: PeftModel, folder: Path | str, *, name: str) -> None:
    """Put another adapter of the same kind into a peft model, kept apart under `name`: frozen, and not computed until
    it is made the active one.

    Raises:
        ModelError: as `load_adapter`; or it is of another kind, or cannot stand beside the adapters that are there.
    """
    info = inspect_adapter(folder)
    base: Any = model.get_base_model()
    rows = [index for indices in (info.config.get("trainable_token_indices") or {}).values() for index in indices]
    if rows and max(rows) >= base.get_input_embeddings().weight.shape[0]:
        raise ModelError(
            f"the adapter {info.folder} has rows for tokens that this model does not have",
            hint="model.new_tokens adds them",
        )
    check_fits(info, base)
    training = model.training
    try:
        model.load_adapter(str(info.folder), name, is_trainable=False, use_safetensors=True)
    except ValueError as error:  # peft's own refusals, such as of several adapters with other fused weights each
        raise ModelError(f"the adapter {info.folder} cannot stand beside another: {error}") from error
    _require_loaded(model, info, name)
    model.train(training)


def grow_embeddings(model: PreTrainedModel, num_rows: int) -> None:
    """Give the vocabulary at least so many rows, new ones like the mean of the old; many models have spare ones."""
    rows: Any = model.get_input_embeddings().weight
    if rows.shape[0] < num_rows:
        model.resize_token_embeddings(num_rows)


def _require_loaded(model: PeftModel, info: AdapterInfo, name: str) -> None:
    """Make sure that the model holds every stored weight.

    peft applies the renamings of old checkpoints of an architecture to adapters, too, where some hit names that are
    right already (Laguna's shared experts, transformers 5.24): such weights keep their first values without an error.

    Raises:
        ModelError: a stored weight has no place.
    """
    import torch
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    held = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    with torch.no_grad():
        for key, stored in load_file(info.folder / WEIGHTS).items():
            value = held.get(key)
            if value is None or value.shape != stored.shape:
                raise ModelError(f"peft found no place for the weight {key} of {info.folder}")
            if value.device.type != "meta" and not torch.equal(value.to("cpu", stored.dtype), stored):
                value.copy_(stored)


def check_fits(info: AdapterInfo, model: nn.Module) -> None:
    """Raise ModelError unless every stored weight has its module in the model, with sizes that agree."""
    modules = dict(model.named_modules())
    missing = sorted(info.modules - modules.keys())
    if not info.modules:
        raise ModelError(f"{info.folder} holds no weights", hint="the run that wrote it trained nothing")
    if missing:
        made_for = f" (it says it was made for {info.base})" if info.base else ""
        raise ModelError(
            f"the adapter {info.folder} does not fit this model: {len(missing)} of its {len(info.modules)} modules are "
            f"not there, such as {missing[0]}{made_for}",
            hint=nearest(missing[0], modules) or "serve it on the base model that it was trained on",
        )
    for key, shape in info.shapes.items():
        if not key.startswith(_PREFIX):
            continue  # VeRA's random matrices, which all modules share
        module = modules[_module_of(key)]
        width, axis, what = _expected_width(key, module)
        if width is not None and shape[axis] != width:
            raise ModelError(
                f"the adapter {info.folder} does not fit this model: {key} has {shape[axis]} {what}, "
                f"the model's {_module_of(key)} has {width}",
                hint="it was trained on a model of another size" + (f": {info.base}" if info.base else ""),
            )


def _expected_width(key: str, module: nn.Module) -> tuple[int | None, int, str]:
    if ".lora_A." in key:
        return getattr(module, "in_features", None), -1, "inputs"
    if ".lora_B." in key:
        return getattr(module, "out_features", None), 0, "outputs"
    return None, 0, ""


def _module_of(key: str) -> str:
    """`base_model.model.model.layers.0.mlp.up_proj.lora_A.weight` -> `model.layers.0.mlp.up_proj`."""
    parts = key.removeprefix(_PREFIX).split(".")
    for i, part in enumerate(parts):
        if part.startswith(("lora_", "ia3_", "oft_", "vera_")):
            # peft wraps a module once for each of its adapted parameters, such as the fused weights of experts
            return re.sub(r"(\.base_layer)+$", "", ".".join(parts[:i]))
        if part == "token_adapter":
            return ".".join(parts[:i])
    return ".".join(parts[:-1])
