"""Attention that keeps packed documents apart, registered by name in transformers' attention interface.

- `gym_per_document`: one scaled-dot-product call per document. Works on every device and dtype, with sliding windows,
  score soft-capping and attention sinks. On two CPU cores it is 4 to 6 times faster than one call under a
  block-diagonal mask for documents of 40 to 250 tokens: it never computes what the mask would hide.
- `gym_varlen`: `torch.nn.attention.varlen`, CUDA in half precision, grouped queries without copies, sliding windows.
- `flash_attention_2` and `_3`: transformers' own functions, where that library is installed; they read the same keyword
  arguments.

The bounds of the documents arrive as `cu_seq_lens_q` (see `gym_trainer.fast.packing`). A call without them is an
error: there is no quiet way to a mask that leaks. Where documents share their beginning, `shared_keys` says which keys
each sees; only the functions of this module know it (`SHARES_PREFIXES`). `why_not_isolated` names the models whose
layers mix positions outside the attention interface (recurrent layers, chunked attention); those train one document at
a time.

Legend: B batch (1), H query heads, K key-value heads, T packed tokens, L one document's tokens, S keys that they see,
E head dimension.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from gym_sdk.errors import GymError
from gym_trainer.fast.packing import PackedLayout
from gym_trainer.fast.prefixes import Prefix, SharedKeys, whole_documents

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PER_DOCUMENT = "gym_per_document"  # not "sdpa" in the name: transformers refuses that word for Gemma 2 and gpt-oss
VARLEN = "gym_varlen"
SHARES_PREFIXES = frozenset({PER_DOCUMENT, VARLEN})
"""What can serve documents whose common beginning stands in the row once."""

_ISOLATING_LAYERS = {"full_attention", "sliding_attention"}
_RECURRENT_CONFIG_KEYS = ("ssm_cfg", "mamba_d_state", "state_size", "conv_kernel", "linear_conv_kernel_dim", "alibi")
_MAX_VARLEN_HEAD_DIM = 256
_WINDOW_ONLY_IN_MASK = {"phimoe"}
"""Models whose layers do not tell the attention function of their window: it stands in the mask alone."""
_POSITIONS_AFTER_PADDING = {
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}
"""Models that number positions from `padding_idx + 1` on, where packed positions start at 0."""


class LeakingAttention(GymError):
    """Packed documents would have seen each other."""


def register() -> None:
    """Add `gym_per_document` and `gym_varlen` to transformers' attention functions. Harmless when repeated."""
    AttentionInterface.register(PER_DOCUMENT, per_document)
    AttentionInterface.register(VARLEN, varlen)


def per_document(
    module: torch.nn.Module,
    query_BHTE: torch.Tensor,
    key_BKTE: torch.Tensor,
    value_BKTE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    shared_keys: SharedKeys | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document by one call per document.

    Args:
        sliding_window: the number of keys a query sees, itself included.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        s_aux: [H] one learned score a head that takes part in the softmax and carries no value (attention sinks).

    Returns:
        [B, T, H, E] and None in place of the attention weights.
    """
    cu_seq_lens = _bounds(cu_seq_lens_q, query_BHTE, attention_mask, kwargs)
    lengths = key_lengths = _lengths(cu_seq_lens)
    if shared_keys is not None:
        assert cu_seq_lens_k is not None
        key_lengths = _lengths(cu_seq_lens_k)
        key_BKTE, value_BKTE = (whole_documents(x, 2, shared_keys) for x in (key_BKTE, value_BKTE))
    num_groups = query_BHTE.shape[1] // key_BKTE.shape[1]
    if num_groups > 1:
        key_BKTE = key_BKTE.repeat_interleave(num_groups, dim=1)
        value_BKTE = value_BKTE.repeat_interleave(num_groups, dim=1)
    out = []
    for query, key, value in zip(
        query_BHTE.split(lengths, dim=2),
        key_BKTE.split(key_lengths, dim=2),
        value_BKTE.split(key_lengths, dim=2),
        strict=True,
    ):
        length, num_keys = query.shape[2], key.shape[2]
        window = sliding_window if sliding_window is not None and sliding_window < num_keys else None
        if softcap is not None or s_aux is not None:
            out_BHLE = _explicit_attention(query, key, value, scaling, dropout, window, softcap, s_aux)
        elif window is not None or num_keys > length:
            mask_LS = _causal_mask(length, num_keys, window, query.device)
            out_BHLE = scaled_dot_product_attention(query, key, value, mask_LS, dropout, scale=scaling)
        else:
            out_BHLE = scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=length > 1, scale=scaling
            )
        out.append(out_BHLE.transpose(1, 2))
    return torch.cat(out, dim=1), None


def varlen(
    module: torch.nn.Module,
    query_BHTE: torch.Tensor,
    key_BKTE: torch.Tensor,
    value_BKTE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    equal_length: int | None = None,
    shared_keys: SharedKeys | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document by torch's variable-length kernel (CUDA, half precision).

    Returns:
        [B, T, H, E] and None in place of the attention weights.

    Raises:
        LeakingAttention: no document bounds, or a feature that the kernel does not have.
    """
    cu_seq_lens = _bounds(cu_seq_lens_q, query_BHTE, attention_mask, kwargs)
    for name, value in (("dropout", dropout or None), ("softcap", softcap), ("attention sinks (s_aux)", s_aux)):
        if value is not None:
            raise LeakingAttention(
                f"{VARLEN} attention has no {name}", hint="set performance.attention=sdpa, which has it"
            )
    if equal_length is not None and sliding_window is None and _has_cudnn_attention(query_BHTE):
        return _dense(query_BHTE, key_BKTE, value_BKTE, equal_length, scaling), None
    kernel, takes_enable_gqa = _varlen_kernel()
    # torch 2.11 groups queries by itself; later versions want it said
    grouped = {"enable_gqa": query_BHTE.shape[1] != key_BKTE.shape[1]} if takes_enable_gqa else {}
    # squeeze, because the gradient of x[0] is a tensor of zeros with another written into it
    query_THE, key_TKE, value_TKE = (x.squeeze(0).transpose(0, 1) for x in (query_BHTE, key_BKTE, value_BKTE))
    bounds_k = cu_seq_lens
    if shared_keys is not None:
        assert cu_seq_lens_k is not None
        # Queries stay where they are; a document's last query sees its last key, and each before it one key less.
        bounds_k = cu_seq_lens_k
        key_TKE, value_TKE = (whole_documents(x, 0, shared_keys) for x in (key_TKE, value_TKE))
    out_THE = kernel(
        query_THE,
        key_TKE,
        value_TKE,
        cu_seq_lens,
        bounds_k,
        max_length_q if max_length_q is not None else query_BHTE.shape[2],
        max_length_q if max_length_q is not None else query_BHTE.shape[2],
        scale=scaling,
        window_size=(-1, 0) if sliding_window is None else (sliding_window - 1, 0),
        **grouped,
    )
    return out_THE[None], None


def choose(
    config: PreTrainedConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    requested: str = "auto",
    *,
    capability: tuple[int, int] | None = None,
) -> str:
    """The attention implementation's name for packed rows on this device, or on one of another CUDA capability.

    Raises:
        LeakingAttention: this model cannot keep packed documents apart (`why_not_isolated` says why).
    """
    if reason := why_not_isolated(config):
        raise LeakingAttention(reason, hint="train with data.packing=false: one document at a time")
    if requested == "sdpa" or why_not_varlen(config, device, dtype, capability=capability):
        return PER_DOCUMENT
    if requested == "varlen":
        return VARLEN
    if is_flash_attn_3_available():
        return "flash_attention_3"
    if is_flash_attn_2_available():
        return "flash_attention_2"
    return VARLEN


def why_not_varlen(
    config: PreTrainedConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Why the variable-length kernel cannot serve this model here, or None when it can."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if capability is None and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
    if capability is not None and capability < (8, 0):
        return "flash kernels need compute capability 8.0 or newer"
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if head_dim > _MAX_VARLEN_HEAD_DIM or head_dim % 8:
        return f"head dimension {head_dim} is not a multiple of 8 up to {_MAX_VARLEN_HEAD_DIM}"
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return "no score soft-capping in the kernel"
    if text.model_type == "gpt_oss":
        return "no attention sinks in the kernel"
    if getattr(text, "attention_dropout", 0.0):
        return "no attention dropout in the kernel"
    return None


def why_not_isolated(config: PreTrainedConfig) -> str | None:
    """Why packed documents would see each other in this model, or None when they would not.

    Judged by the configuration, so that it can be asked before weights load; `check_isolation` asks the model itself.
    """
    text = config.get_text_config()
    foreign = sorted(set(getattr(text, "layer_types", None) or ()) - _ISOLATING_LAYERS)
    if foreign:
        return f"{text.model_type} has {', '.join(foreign)} layers, which mix neighbouring documents"
    recurrent = [key for key in _RECURRENT_CONFIG_KEYS if getattr(text, key, None)]
    if recurrent:
        return f"{text.model_type} mixes positions outside attention ({', '.join(recurrent)} in its configuration)"
    if text.model_type in _WINDOW_ONLY_IN_MASK and getattr(text, "sliding_window", None) is not None:
        return f"{text.model_type} has its window in the mask alone, which packed attention does without"
    if text.model_type in _POSITIONS_AFTER_PADDING:
        return f"{text.model_type} numbers positions from padding_idx + 1 on"
    if getattr(config, "is_encoder_decoder", False):
        return f"{config.model_type} is an encoder-decoder"
    return None


@contextmanager
def attention_of(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """The model with another attention implementation, restored afterwards."""
    register()
    previous = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    if model.config._attn_implementation != implementation:
        raise LeakingAttention(
            f"{type(model).__name__} does not take its attention from transformers' interface",
            hint="train with data.packing=false: one document at a time",
        )
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


@torch.no_grad()
def check_isolation(model: PreTrainedModel, tolerance: float | None = None) -> None:
    """Show by forwards of two short documents that the model, as it stands, keeps them apart.

    The second document's logits must not change when the first is replaced, and must be those that it has alone, with
    positions from 0. Costs three forwards of up to 16 tokens.

    Raises:
        LeakingAttention: they moved by more than `tolerance` (relative; the dtype's rounding when not given), or by ten
            times as much from those alone, whose products have other shapes and so another rounding.
    """
    ids = _probe_ids(model)
    ids[1, 7:] = ids[0, 7:]
    first, second = (_logits(model, ids[i], [7, 9])[7:] for i in range(2))
    alone = _logits(model, ids[0, 7:], [9])
    if tolerance is None:
        tolerance = _rounding(model)
    _show_equal(model, first, second, tolerance, "packed documents see each other")
    _show_equal(model, first, alone, 10 * tolerance, "a packed document does not begin at position 0")


@torch.no_grad()
def check_sharing(model: PreTrainedModel) -> None:
    """Show that a document whose beginning stands in another one gets the logits that it has alone.

    Costs two forwards of up to 16 tokens.

    Raises:
        LeakingAttention: it does not, because the model's layers do not hand on what the attention must know.
    """
    ids = _probe_ids(model)[0]
    shared = _logits(model, ids, [9, 7], [Prefix(0, 0), Prefix(0, 6)])[9:]
    alone = _logits(model, torch.cat([ids[:6], ids[9:]]), [13])[6:]
    _show_equal(model, alone, shared, 10 * _rounding(model), "a shared beginning is not seen")


def _probe_ids(model: PreTrainedModel) -> torch.Tensor:
    device = cast(torch.Tensor, model.get_input_embeddings().weight).device
    vocab_size = model.config.get_text_config().vocab_size
    return torch.randint(0, vocab_size, (2, 16), generator=torch.Generator().manual_seed(0)).to(device)


def _logits(
    model: PreTrainedModel, ids_T: torch.Tensor, lengths: list[int], prefixes: Sequence[Prefix] = ()
) -> torch.Tensor:
    """Of a packed row, in evaluation mode: float64 [T, V]."""
    layout = PackedLayout.from_lengths(lengths, ids_T.device, prefixes=prefixes)
    was_training = model.training
    model.eval()
    try:
        return model(input_ids=ids_T[None], use_cache=False, **layout.model_kwargs()).logits[0].double()
    finally:
        model.train(was_training)


def _rounding(model: PreTrainedModel) -> float:
    return 1e-4 if model.dtype == torch.float32 else 0.02


def _show_equal(
    model: PreTrainedModel, expected: torch.Tensor, got: torch.Tensor, tolerance: float, otherwise: str
) -> None:
    error = float((expected - got).norm() / expected.norm())
    if not error <= tolerance:
        raise LeakingAttention(
            f"{otherwise} in {type(model).__name__}: logits moved by {error:.2e}",
            hint="train with data.packing=false: one document at a time",
        )


@torch.no_grad()
def is_moved_by_padding(model: PreTrainedModel) -> bool:
    """Whether a document's logits change by what is padded behind it, although a mask says so: CPM-Ant looks for
    padding before a document only. Costs two forwards of 12 tokens."""
    was_training = model.training
    model.eval()
    try:
        device = cast(torch.Tensor, model.get_input_embeddings().weight).device
        vocab_size = model.config.get_text_config().vocab_size
        ids = torch.randint(3, vocab_size, (2, 12), generator=torch.Generator().manual_seed(0)).to(device)
        alone = model(input_ids=ids[:1, :7], use_cache=False).logits[0].double()
        mask = torch.ones_like(ids)
        ids[0, 7:], mask[0, 7:] = 0, 0
        padded = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0, :7].double()
    finally:
        model.train(was_training)
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    return not bool((alone - padded).norm() <= tolerance * alone.norm())


def _has_cudnn_attention(query_BHTE: torch.Tensor) -> bool:
    """Where cuDNN's dense kernel takes 0.6 of the flash kernel's time (measured on an H200, 4 x 2048)."""
    return query_BHTE.is_cuda and query_BHTE.shape[-1] <= 128 and torch.backends.cudnn.is_available()


def _dense(
    query_BHTE: torch.Tensor, key_BKTE: torch.Tensor, value_BKTE: torch.Tensor, length: int, scaling: float | None
) -> torch.Tensor:
    """Documents of one length as the rows of a batch. [1, T, H, E]."""

    def rows(x_BHTE: torch.Tensor) -> torch.Tensor:
        _, num_heads, num_tokens, head_dim = x_BHTE.shape
        return (
            x_BHTE.squeeze(0).transpose(0, 1).reshape(num_tokens // length, length, num_heads, head_dim).transpose(1, 2)
        )

    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(backends, set_priority=True):
        out = scaled_dot_product_attention(
            rows(query_BHTE),
            rows(key_BKTE),
            rows(value_BKTE),
            is_causal=True,
            scale=scaling,
            enable_gqa=query_BHTE.shape[1] != key_BKTE.shape[1],
        )
    return out.transpose(1, 2).reshape(1, -1, *query_BHTE.shape[1::2])


@functools.cache
def _varlen_kernel() -> tuple[Callable[..., torch.Tensor], bool]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def _bounds(
    cu_seq_lens: torch.Tensor | None, query_BHTE: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> torch.Tensor:
    if cu_seq_lens is None:
        raise LeakingAttention(
            "packed attention was called without document bounds (cu_seq_lens_q)",
            hint="pass PackedLayout.model_kwargs() to the model's forward",
        )
    if query_BHTE.shape[0] != 1 or mask is not None or kwargs.get("position_bias") is not None:
        raise LeakingAttention("packed attention takes one row [1, T], without a mask or a position bias")
    return cu_seq_lens


_LENGTHS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _lengths(cu_seq_lens: torch.Tensor) -> list[int]:
    """The documents' lengths on the host, read from the device once a micro-batch instead of once a layer."""
    if cu_seq_lens not in _LENGTHS:
        _LENGTHS[cu_seq_lens] = torch.diff(cu_seq_lens).tolist()
    return _LENGTHS[cu_seq_lens]


def _causal_mask(length: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which of the keys each of the last `length` positions sees."""
    before = num_keys - length
    mask_LS = torch.ones(length, num_keys, dtype=torch.bool, device=device).tril(before)
    return mask_LS if window is None else mask_LS.triu(before + 1 - window)


def _explicit_attention(
    query_BHLE: torch.Tensor,
    key_BHSE: torch.Tensor,
    value_BHSE: torch.Tensor,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attention written out, for what the fused call lacks: soft-capped scores (Gemma 2) and sinks (gpt-oss)."""
    scale = scaling if scaling is not None else query_BHLE.shape[-1] ** -0.5
    scores_BHLS = (query_BHLE @ key_BHSE.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores_BHLS = softcap * torch.tanh(scores_BHLS / softcap)
    length, num_keys = scores_BHLS.shape[-2:]
    scores_BHLS = scores_BHLS.masked_fill(~_causal_mask(length, num_keys, window, query_BHLE.device), float("-inf"))
    if sinks_H is not None:
        sink_BHL1 = sinks_H.float().reshape(1, -1, 1, 1).expand(*scores_BHLS.shape[:3], 1)
        scores_BHLS = torch.cat([scores_BHLS, sink_BHL1], dim=-1)
    weights_BHLS = scores_BHLS.softmax(dim=-1)[..., :num_keys].to(value_BHSE.dtype)
    return torch.nn.functional.dropout(weights_BHLS, dropout) @ value_BHSE
