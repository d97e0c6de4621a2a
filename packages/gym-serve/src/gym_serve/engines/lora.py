"""Many LoRA adapters on one model, each row of a batch with its own.

Adapters stand beside each other: for a linear layer, the A matrices of all that a step uses are stacked to [S, D_in]
and the B matrices to [S, D_out], where S is the sum of their ranks. One product gives every token its S inner values, a
mask zeroes those of other adapters (masks, not multiplies: no value of another adapter reaches a row, not even a NaN),
and a second product adds them up. That is two small products a layer however the rows are mixed; S stays small beside
D while few adapters are in play at once, and only those in play are stacked.

Shapes: T packed tokens, S stacked rank, A adapters of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gym_sdk.errors import ModelError
from gym_serve.models.adapters import WEIGHTS, AdapterInfo, check_fits, inspect_adapter


@dataclass(frozen=True, kw_only=True)
class _Delta:
    """An adapter's part in one linear layer, scaled: output += B (A x); DoRA also rescales the output."""

    a_SD: torch.Tensor
    b_SD: torch.Tensor
    """[S, D_out], the transpose of peft's B, with the scaling in it."""
    magnitude_D: torch.Tensor | None = None
    """DoRA: what each output of base and update together is multiplied by."""


@dataclass(frozen=True, kw_only=True)
class LoadedAdapter:
    """An adapter in memory."""

    content_id: str
    rank: int
    """The largest of its layers; the others are padded with zeros to it."""
    deltas: dict[str, _Delta]


@dataclass
class _Stack:
    """The adapters of a step, side by side, in one layer."""

    a_SD: torch.Tensor
    b_SD: torch.Tensor
    magnitude_AD: torch.Tensor | None


@dataclass
class _Step:
    """What the layers need to know about the step that is running."""

    stacks: dict[str, _Stack] = field(default_factory=dict)
    mask_TS: torch.Tensor | None = None
    """True where a token's adapter does NOT own the inner value; None when all tokens share the only adapter."""
    adapter_T: torch.Tensor | None = None
    """Per token, its place among the step's adapters; the last place is the base."""


class AdapterBank:
    """The adapters of one engine, applied through hooks on the layers that any of them changes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._adapters: dict[str, LoadedAdapter] = {}
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._stacked: tuple[str, ...] = ()
        self._step = _Step()
        parameter = next(model.parameters())
        self._device = parameter.device
        self._dtype = parameter.dtype if parameter.dtype.is_floating_point else torch.float32

    @property
    def content_ids(self) -> frozenset[str]:
        return frozenset(self._adapters)

    def read(self, folder: Path) -> LoadedAdapter:
        """Load an adapter's weights without using them yet. May run beside a step, in another thread.

        Raises:
            ModelError: not plain LoRA, made for another model, or with weights that are not finite.
        """
        info = inspect_adapter(folder)
        check_fits(info, self._model)
        return _read(info, self._model, self._device, self._dtype)

    def add(self, adapter: LoadedAdapter) -> None:
        """Make an adapter usable."""
        self._adapters[adapter.content_id] = adapter
        for name in adapter.deltas.keys() - self._hooks.keys():
            module = self._model.get_submodule(name)
            self._hooks[name] = module.register_forward_hook(self._hook(name))

    def remove(self, content_id: str) -> None:
        """Forget an adapter. No step may be using it."""
        self._adapters.pop(content_id, None)
        if content_id in self._stacked:
            self._stacked, self._step.stacks = (), {}

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._adapters.clear()
        self._step = _Step()

    def begin_step(self, runs: Sequence[tuple[str | None, int]]) -> None:
        """Say whose tokens the next forward holds: (adapter or None, number of tokens), in the order of the row."""
        active = sorted({adapter for adapter, _ in runs if adapter is not None})
        if not active:
            self._step.adapter_T = self._step.mask_TS = None
            return
        # A stack that also holds a few idle adapters is not worth rebuilding.
        if not set(active) <= set(self._stacked) or len(self._stacked) > 2 * len(active) + 2:
            self._stack(active)
        place = {adapter: i for i, adapter in enumerate(self._stacked)}
        base = len(self._stacked)
        places = torch.tensor([place.get(adapter, base) if adapter else base for adapter, _ in runs])
        counts = torch.tensor([count for _, count in runs])
        self._step.adapter_T = places.repeat_interleave(counts).to(self._device)
        if len(self._stacked) == 1 and all(adapter is not None for adapter, _ in runs):
            self._step.mask_TS = None
            return
        owner_S = torch.cat([torch.full((self._adapters[a].rank,), i) for i, a in enumerate(self._stacked)])
        self._step.mask_TS = self._step.adapter_T[:, None] != owner_S.to(self._device)

    def _stack(self, active: Sequence[str]) -> None:
        self._stacked = tuple(active)
        adapters = [self._adapters[content_id] for content_id in active]
        names = sorted(set().union(*(adapter.deltas.keys() for adapter in adapters)))
        self._step.stacks = {name: _stack_layer(name, adapters) for name in names}

    def _hook(self, name: str):
        def apply(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            step = self._step
            stack = step.stacks.get(name) if step.adapter_T is not None else None
            if stack is None:
                return output
            x = args[0].reshape(-1, args[0].shape[-1])
            inner_TS = functional.linear(x.to(stack.a_SD.dtype), stack.a_SD)
            if step.mask_TS is not None:
                inner_TS.masked_fill_(step.mask_TS, 0.0)
            flat = output.reshape(-1, output.shape[-1])
            if stack.magnitude_AD is not None:
                scale_TD = stack.magnitude_AD[step.adapter_T]
                bias = getattr(module, "bias", None)
                flat = flat * scale_TD if bias is None else (flat - bias) * scale_TD + bias
            return torch.addmm(flat, inner_TS, stack.b_SD.to(flat.dtype)).view(output.shape)

        return apply


def _stack_layer(name: str, adapters: Sequence[LoadedAdapter]) -> _Stack:
    present = next(adapter.deltas[name] for adapter in adapters if name in adapter.deltas)
    a_parts: list[torch.Tensor] = []
    b_parts: list[torch.Tensor] = []
    magnitudes: list[torch.Tensor | None] = []
    for adapter in adapters:
        delta = adapter.deltas.get(name)
        a = present.a_SD.new_zeros(adapter.rank, present.a_SD.shape[1])
        b = present.b_SD.new_zeros(adapter.rank, present.b_SD.shape[1])
        if delta is not None:
            a[: delta.a_SD.shape[0]] = delta.a_SD
            b[: delta.b_SD.shape[0]] = delta.b_SD
        a_parts.append(a)
        b_parts.append(b)
        magnitudes.append(delta.magnitude_D if delta is not None else None)
    magnitude_AD: torch.Tensor | None = None
    if any(magnitude is not None for magnitude in magnitudes):
        ones = torch.ones_like(present.b_SD[0])
        magnitude_AD = torch.stack([*(ones if m is None else m for m in magnitudes), ones])
    return _Stack(torch.cat(a_parts), torch.cat(b_parts), magnitude_AD)


_KNOWN_SETTINGS: dict[str, Iterable[object]] = {
    # Settings of LoraConfig that change the arithmetic, with the values that this module computes.
    "bias": ("none",),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "trainable_token_indices": (None, {}),
    "target_parameters": (None, []),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
}


def _read(info: AdapterInfo, model: nn.Module, device: torch.device, dtype: torch.dtype) -> LoadedAdapter:
    from safetensors.torch import load_file

    config = info.config
    merge = "merge it into its base instead: `gym export RUN --merge FOLDER`"
    if info.kind != "lora":
        raise ModelError(f"{info.folder} is a {info.kind} adapter; batches mix LoRA adapters only", hint=merge)
    for setting, known in _KNOWN_SETTINGS.items():
        if config.get(setting, next(iter(known))) not in known:
            raise ModelError(f"{info.folder} sets {setting}, which cannot be mixed in a batch", hint=merge)
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(("pissa", "olora", "corda", "loftq")):
        raise ModelError(
            f"{info.folder} was saved as {start}, which also changes the base weights",
            hint="save it as plain LoRA: peft's save_pretrained(path_initial_model_for_weight_conversion=...)",
        )
    weights = load_file(info.folder / WEIGHTS)
    ranks: dict[str, int] = {}
    deltas: dict[str, _Delta] = {}
    for name in sorted(info.modules):
        prefix = f"base_model.model.{name}"
        found = {key: value for key, value in weights.items() if key.startswith(f"{prefix}.lora_")}
        a, b = found.pop(f"{prefix}.lora_A.weight", None), found.pop(f"{prefix}.lora_B.weight", None)
        magnitude = found.pop(f"{prefix}.lora_magnitude_vector", None)
        if a is None or b is None or found or a.ndim != 2 or b.ndim != 2:
            raise ModelError(f"{info.folder} holds no plain pair of A and B for {name}", hint=merge)
        for value in (a, b, *([magnitude] if magnitude is not None else [])):
            if not torch.isfinite(value).all():
                raise ModelError(f"{info.folder} has weights that are not finite in {name}", hint="its run diverged")
        rank = ranks[name] = a.shape[0]
        scaling = _scaling(config, name, rank)
        b_scaled = b.float() * scaling
        factor: torch.Tensor | None = None
        if config.get("use_dora", False):
            if magnitude is None:
                raise ModelError(f"{info.folder} uses DoRA but stores no magnitudes for {name}")
            weight = _plain_weight(model.get_submodule(name), info)
            norm = torch.linalg.vector_norm(weight.float() + (b_scaled @ a.float()).to(weight.device), dim=1)
            ratio = magnitude.float() / norm.cpu()
            factor, b_scaled = ratio, b_scaled * ratio[:, None]
        deltas[name] = _Delta(
            a_SD=a.to(device, dtype),
            b_SD=b_scaled.T.contiguous().to(device, dtype),
            magnitude_D=None if factor is None else factor.to(device, dtype),
        )
    return LoadedAdapter(content_id=info.content_id, rank=max(ranks.values()), deltas=deltas)


def _scaling(config: dict[str, Any], name: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank) under rsLoRA; alpha may differ by layer."""
    pattern = config.get("alpha_pattern") or {}
    assert isinstance(pattern, dict)
    alpha = next((v for key, v in pattern.items() if name == key or name.endswith(f".{key}")), config["lora_alpha"])
    return float(str(alpha)) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _plain_weight(module: nn.Module, info: AdapterInfo) -> torch.Tensor:
    weight = module.weight
    if not isinstance(weight, torch.Tensor) or not weight.dtype.is_floating_point or weight.ndim != 2:
        raise ModelError(
            f"{info.folder} uses DoRA, whose norms need plain base weights",
            hint="load the base without quantization, or merge the adapter",
        )
    return weight
