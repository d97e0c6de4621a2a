"""A resolved model into memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from gym_sdk.errors import MissingExtra, ModelError
from gym_serve.models.config import config_hint, first_line, read_config
from gym_serve.models.direct_weights import kept_unquantized
from gym_serve.models.resolution import ResolvedModel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SCORE_HEAD = "score"
"""The name of the head of transformers' sequence classifiers over decoders."""

_MISMATCH = "ignore_mismatched_sizes"
"""The setting that transformers names where weights and configuration have other shapes."""

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


def load_model(
    resolved: ResolvedModel,
    *,
    dtype: torch.dtype | DtypeName = "auto",
    device: torch.device | str = "cpu",
    quantization: Literal["none", "nf4", "int8"] = "none",
    attention: str | None = None,
    trust_remote_code: bool = False,
    scores: Sequence[str] | None = None,
) -> PreTrainedModel:
    """A `transformers` causal language model in evaluation mode, with frozen precision and placement.

    With `scores` it is a sequence classifier instead, whose head gives a number for each of these names; a head that
    the folder does not have is new, with random weights.

    `dtype="auto"` is bfloat16 on devices that compute in it, float16 on older cards, float32 on processors (see
    `default_dtype`). `attention` is a name of transformers' attention interface; its default when None. Remote
    code runs only with `trust_remote_code`, which is the operator's to give.

    Raises:
        ModelError: the architecture is unknown to the installed transformers, weights are missing or have the wrong
            shape, or the device is not there.
        MissingExtra: torch, or bitsandbytes for `nf4` and `int8`, is not installed.
    """
    try:
        import torch
        from huggingface_hub.errors import StrictDataclassError
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    except ImportError as error:
        raise MissingExtra("loading a model", package="gym-serve", extra="torch") from error

    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("there is no CUDA device", hint="use device cpu; `gym doctor` says what this machine has")
    if isinstance(dtype, str):
        compute: torch.dtype = default_dtype(device) if dtype == "auto" else getattr(torch, dtype)
    else:
        compute = dtype
    options: dict[str, Any] = {"dtype": compute, "device_map": {"": device}, "trust_remote_code": trust_remote_code}
    if attention is not None:
        options["attn_implementation"] = attention
    if quantization != "none":
        unquantized = _unquantized_layers(resolved, trust_remote_code=trust_remote_code)
        options["quantization_config"] = _quantization(quantization, compute, unquantized)
    auto_class: Any = AutoModelForCausalLM
    if scores is not None:
        auto_class = AutoModelForSequenceClassification
        options["id2label"] = dict(enumerate(scores))
        options["label2id"] = {name: number for number, name in enumerate(scores)}
    try:
        with _no_bars(quiet=scores is not None):
            loaded: Any = auto_class.from_pretrained(
                resolved.folder, local_files_only=True, use_safetensors=True, output_loading_info=True, **options
            )
    except (ValueError, KeyError, OSError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        told = "its weights have other shapes than its config.json says" if _MISMATCH in str(error) else None
        raise ModelError(
            f"{resolved.source} cannot be loaded: {told or first_line(error)}", hint=config_hint(str(error))
        ) from error
    model: PreTrainedModel = loaded[0]
    new_head = f"{SCORE_HEAD}." if scores is not None else None
    if missing := sorted(key for key in loaded[1]["missing_keys"] if new_head is None or not key.startswith(new_head)):
        raise ModelError(
            f"{resolved.source} lacks {len(missing)} weights, such as {missing[0]}",
            hint="the folder is incomplete, or its config.json belongs to another model",
        )
    if quantization == "nf4" and device.type == "cpu":
        _keep_differentiable(model)
    return model.eval()


def _keep_differentiable(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from repacking 4-bit weights in the first evaluation on a processor with AVX-512 BF16.

    The packed form has no gradient for its input, so that a model evaluated before it is trained would learn in its
    last layers only, without a word; it also fails for layers whose sizes are not multiples of 32 and 64.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 - torch types every attribute as a tensor


@contextmanager
def _no_bars(*, quiet: bool = False) -> Iterator[None]:
    """transformers draws a bar for a load of two seconds; a command's own output is enough.

    `quiet` also keeps its table of missing weights back, where a head is new on purpose.
    """
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    if quiet:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device has it in hardware, float16 on older CUDA cards (T4, V100), float32 elsewhere."""
    import torch

    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.float16 if device.type == "mps" else torch.float32


def _unquantized_layers(resolved: ResolvedModel, *, trust_remote_code: bool) -> list[str] | None:
    """The layers that keep their weights; None for those that transformers leaves out by itself, such as the head.

    A list replaces transformers' own, so that it holds both.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.quantizers.base import get_keys_to_not_convert

    config = read_config(resolved.folder, trust_remote_code=trust_remote_code)
    direct = kept_unquantized(config.model_type)
    if not direct:
        return None
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return [*get_keys_to_not_convert(model), SCORE_HEAD, *sorted(direct)]


def _quantization(kind: Literal["nf4", "int8"], dtype: torch.dtype, unquantized: list[str] | None) -> object:
    if importlib.util.find_spec("bitsandbytes") is None:  # transformers would say so only deep inside the load
        raise MissingExtra(f"holding the base in {kind}", package="gym-trainer", extra="cuda")
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=unquantized)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        llm_int8_skip_modules=unquantized,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
