"""Checkpoints that come quantized: trained on where that is possible, refused with the reason before weights load."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from gym_sdk.errors import ModelError
from gym_sdk.spec.adapter import is_whole_model

if TYPE_CHECKING:
    from gym_sdk.spec import RunSpec

_PACKAGES = {"gptq": "gptqmodel", "awq": "gptqmodel", "bitsandbytes": "bitsandbytes"}
"""Methods whose layers an adapter can be trained beside, by the package that computes them."""
_NEEDS_CUDA = {"gptq", "awq"}


def prequantized_method(config: Any) -> str | None:
    """How the checkpoint of a transformers configuration is quantized; None where it is not."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method))


def check_prequantized(config: Any, spec: RunSpec) -> None:
    """Find what cannot work on such a checkpoint.

    Raises:
        ModelError: with the reason, and what would work.
    """
    method = prequantized_method(config)
    if method is None:
        return
    what = f"{spec.model.source} comes quantized by {method}"
    other = "use the model that it was made from, with model.quantization=nf4"
    if spec.model.quantization != "none":
        raise ModelError(
            f"{what}, and model.quantization is {spec.model.quantization}", hint="set model.quantization to none"
        )
    if is_whole_model(spec.adapter):
        raise ModelError(f"{what}: its weights are integers, which cannot be trained", hint="use adapter.kind=lora")
    if method not in _PACKAGES:
        raise ModelError(f"{what}, through whose layers transformers computes no gradients", hint=other)
    package = _PACKAGES[method]
    if importlib.util.find_spec(package) is None:
        raise ModelError(f"{what}, and {package} is not installed", hint=f"pip install {package}, or {other}")
    if spec.output.merge:
        raise ModelError(f"output.merge: {what}, into which no update can be added", hint="serve the adapter beside it")
    if method in _NEEDS_CUDA:
        import torch

        if not torch.cuda.is_available():
            raise ModelError(f"{what}, which computes on a CUDA device only, and there is none", hint=other)
