"""What a decoder layer does between its matrix products, each with its gradient: in plain torch, and on CUDA in Triton.

The plain forms say what is computed; the kernels (`_kernels`, `_lora_kernels`) do the same with each tensor read once.
All write into tensors they are given, so that a result can lie beside the columns of LoRA that the next product reads
with it.

Legend: T tokens, D hidden size, I width of a linear layer's input, O of its output, N columns of LoRA, H query heads,
K key and value heads, E head dimension.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType
from typing import NamedTuple

import torch


class HeadNorms(NamedTuple):
    """Norms of each query and key head before they are rotated (Qwen3)."""

    query_weight_E: torch.Tensor
    key_weight_E: torch.Tensor
    query_eps: float
    key_eps: float


def rms_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    out_TD: torch.Tensor,
    *,
    delta_TD: torch.Tensor | None = None,
    sum_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """The norm of `x + delta`, written to `out_TD`, and that sum to `sum_TD`. Returns 1 / root mean square [T]."""
    if kernels := _kernels(x_TD):
        return kernels.rms_norm(x_TD, weight_D, eps, out_TD, delta_TD, sum_TD)
    if _is_simulated(x_TD):
        for written in (out_TD, *(() if sum_TD is None else (sum_TD,))):
            written.zero_()
        return x_TD.new_empty(len(x_TD), dtype=torch.float32)
    if delta_TD is not None:
        assert sum_TD is not None
        x_TD = torch.add(x_TD, delta_TD, out=sum_TD)
    wide = _wide(x_TD)
    rstd_T = torch.rsqrt(wide.square().mean(-1) + eps)
    out_TD.copy_((wide * rstd_T[:, None]).to(x_TD.dtype) * weight_D)
    return rstd_T


def rms_norm_backward(
    grad_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    rstd_T: torch.Tensor,
    residual_TD: torch.Tensor,
    out_TD: torch.Tensor,
) -> None:
    """The gradient of the norm's input, plus that of the residual beside it, written to `out_TD`."""
    if kernels := _kernels(x_TD):
        kernels.rms_norm_backward(grad_TD, x_TD, weight_D, rstd_T, residual_TD, out_TD)
        return
    if _is_simulated(x_TD):
        torch.add(grad_TD, x_TD, out=out_TD)
        return
    normed_TD = _wide(x_TD) * rstd_T[:, None]
    grad_TD = _wide(grad_TD) * weight_D
    mean_T1 = (grad_TD * normed_TD).mean(-1, keepdim=True)
    out_TD.copy_(residual_TD + rstd_T[:, None] * (grad_TD - normed_TD * mean_T1))


def normed(x_TD: torch.Tensor, norm: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The norm's output again, from its 1 / root mean square [T] and its weight [D]."""
    rstd_T, weight_D = norm
    return (_wide(x_TD) * rstd_T[..., None]).to(x_TD.dtype) * weight_D


def rotate(
    qkv_TO: torch.Tensor,
    cos_TE: torch.Tensor,
    sin_TE: torch.Tensor,
    norms: HeadNorms | None,
    query_THE: torch.Tensor,
    key_TKE: torch.Tensor,
) -> None:
    """Queries and keys, normed where the model does that, and rotated by their positions."""
    if kernels := _kernels(qkv_TO):
        weights, eps = _parts(norms)
        kernels.rotate(qkv_TO, cos_TE, sin_TE, weights, eps, query_THE, key_TKE)
        return
    if _is_simulated(qkv_TO):
        query_THE.zero_()
        key_TKE.zero_()
        return
    query, key, _ = _heads(qkv_TO, query_THE.shape[1], key_TKE.shape[1], query_THE.shape[2])
    if norms is not None:
        query = normed(query, (_head_rstd(query, norms.query_eps), norms.query_weight_E))
        key = normed(key, (_head_rstd(key, norms.key_eps), norms.key_weight_E))
    for x, out in ((query, query_THE), (key, key_TKE)):
        low, high = _wide(x).chunk(2, dim=-1)
        out.copy_(_wide(x) * cos_TE[:, None] + torch.cat([-high, low], dim=-1) * sin_TE[:, None])


def rotate_backward(
    grad_query_THE: torch.Tensor,
    grad_key_TKE: torch.Tensor,
    grad_value_TKE: torch.Tensor,
    qkv_TO: torch.Tensor,
    cos_TE: torch.Tensor,
    sin_TE: torch.Tensor,
    norms: HeadNorms | None,
    out_TO: torch.Tensor,
) -> None:
    """The gradients of queries, keys and values as the projection made them, side by side."""
    if kernels := _kernels(qkv_TO):
        weights, eps = _parts(norms)
        kernels.rotate_backward(
            grad_query_THE, grad_key_TKE, grad_value_TKE, qkv_TO, cos_TE, sin_TE, weights, eps, out_TO
        )
        return
    if _is_simulated(qkv_TO):
        out_TO.copy_(qkv_TO)
        return
    sizes = grad_query_THE.shape[1], grad_key_TKE.shape[1], grad_query_THE.shape[2]
    query, key, _ = _heads(qkv_TO, *sizes)
    out_query, out_key, out_value = _heads(out_TO, *sizes)
    out_value.copy_(grad_value_TKE)
    weights, eps = _parts(norms)
    for x, grad, out, number in ((query, grad_query_THE, out_query, 0), (key, grad_key_TKE, out_key, 1)):
        turned_low, turned_high = (_wide(grad) * sin_TE[:, None]).chunk(2, dim=-1)
        unrotated = _wide(grad) * cos_TE[:, None] + torch.cat([turned_high, -turned_low], dim=-1)
        if weights is not None:
            rstd = _head_rstd(x, eps[number])[..., None]
            unrotated = unrotated * weights[number]
            unit = _wide(x) * rstd
            unrotated = rstd * (unrotated - unit * (unrotated * unit).mean(-1, keepdim=True))
        out.copy_(unrotated)


def swiglu(both_TO: torch.Tensor, out_TI: torch.Tensor) -> None:
    """`silu(gate) * up` of the two side by side."""
    if kernels := _kernels(both_TO):
        kernels.swiglu(both_TO, out_TI)
    elif _is_simulated(both_TO):
        out_TI.copy_(both_TO[:, : out_TI.shape[1]])
    else:
        gate, up = _wide(both_TO).chunk(2, dim=-1)
        out_TI.copy_(torch.nn.functional.silu(gate) * up)


def swiglu_backward_(both_TO: torch.Tensor, grad_TI: torch.Tensor) -> None:
    """In place: gate and up become their gradients, and the gradient of the product becomes the product."""
    if kernels := _kernels(both_TO):
        kernels.swiglu_backward(both_TO, grad_TI)
        return
    if _is_simulated(both_TO):
        both_TO.zero_()
        grad_TI.zero_()
        return
    gate, up = _wide(both_TO).chunk(2, dim=-1)
    grad = _wide(grad_TI)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    gradients = torch.cat([grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu], dim=-1)
    grad_TI.copy_(silu * up)
    both_TO.copy_(gradients)


def project(
    x_TI: torch.Tensor,
    small_NI: torch.Tensor,
    out_TN: torch.Tensor,
    *,
    copy_TI: torch.Tensor | None = None,
    second_TN: torch.Tensor | None = None,
) -> None:
    """`x @ small.T` with few columns, once more to `second_TN`, and a copy of `x` made on the way, where asked."""
    if _has_kernels(x_TI):
        from gym_trainer.fast.fused import _lora_kernels as kernels

        if len(small_NI) <= kernels.MOST_COLUMNS:
            kernels.project(x_TI, small_NI, out_TN, copy_TI, second_TN)
            return
    product_TN = torch.mm(x_TI, small_NI.T)
    for out in (out_TN, second_TN):
        if out is not None:
            out.copy_(product_TN)
    if copy_TI is not None:
        copy_TI.zero_() if _is_simulated(x_TI) else copy_TI.copy_(x_TI)


def reduce_rows(
    small_TN: torch.Tensor, x_TI: torch.Tensor, *, norm: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """`small.T @ x` in parts that are still to be added up, float32 or wider [S, N, I].

    With `norm` (1 / root mean square and weight), of the normed `x`.
    """
    if _has_kernels(x_TI):
        from gym_trainer.fast.fused import _lora_kernels as kernels

        if small_TN.shape[1] <= kernels.MOST_COLUMNS:
            return kernels.reduce_rows(small_TN, x_TI, norm)
    x_TI = x_TI if norm is None or _is_simulated(x_TI) else normed(x_TI, norm)
    return _wide(torch.mm(small_TN.T, x_TI))[None]


def _is_simulated(x: torch.Tensor) -> bool:
    """A plan's simulation of the kernels: nothing is made beside what they write, and as much is read and written."""
    return x.is_meta and x.dtype in (torch.bfloat16, torch.float16)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _parts(norms: HeadNorms | None) -> tuple[tuple[torch.Tensor, torch.Tensor] | None, tuple[float, float]]:
    return (None, (0.0, 0.0)) if norms is None else (norms[:2], norms[2:])


def _head_rstd(x_THE: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(_wide(x_THE).square().mean(-1) + eps)


def _heads(
    qkv_TO: torch.Tensor, num_query_heads: int, num_key_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the three parts as heads."""
    sizes = [num_query_heads * head_dim, num_key_heads * head_dim, num_key_heads * head_dim]
    query, key, value = (part.unflatten(-1, (-1, head_dim)) for part in qkv_TO.split(sizes, dim=-1))
    return query, key, value


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _has_kernels(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and _has_triton()


def _kernels(x: torch.Tensor) -> ModuleType | None:
    if not _has_kernels(x):
        return None
    from gym_trainer.fast.fused import _kernels

    return _kernels
