"""Norms, rotations and the gated activation in Triton: each tensor is read once, and written where it is read next.

Every tensor is a matrix of rows with unit stride inside a row and any stride between rows. Sums are float32.

Legend: T tokens, D hidden size, I width of the activation, O outputs of joined layers, E head dimension.
"""

# Triton reads a kernel's parameters itself: their types are not Python's.
# pyright: reportMissingParameterType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm(
    x_ptr,
    delta_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    rstd_ptr,
    width,
    stride_x,
    stride_delta,
    stride_sum,
    stride_out,
    eps,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + row * stride_delta + columns, mask=inside, other=0.0).to(tl.float32)
        # what the backward pass will read is the sum as it is kept
        x = x.to(dtype).to(tl.float32)
        tl.store(sum_ptr + row * stride_sum + columns, x.to(dtype), mask=inside)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    out = (x * rstd).to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + row * stride_out + columns, out.to(dtype), mask=inside)


def rms_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    out_TD: torch.Tensor,
    delta_TD: torch.Tensor | None,
    sum_TD: torch.Tensor | None,
) -> torch.Tensor:
    """Writes the norm of `x` (plus `delta`, the sum kept in `sum_TD`); returns the reciprocal deviations [T]."""
    num_rows, width = x_TD.shape
    rstd_T = torch.empty(num_rows, device=x_TD.device, dtype=torch.float32)
    delta = x_TD if delta_TD is None else delta_TD
    kept = x_TD if sum_TD is None else sum_TD
    block = triton.next_power_of_2(width)
    _rms_norm[(num_rows,)](
        x_TD,
        delta,
        weight_D,
        kept,
        out_TD,
        rstd_T,
        width,
        x_TD.stride(0),
        delta.stride(0),
        kept.stride(0),
        out_TD.stride(0),
        eps,
        HAS_DELTA=delta_TD is not None,
        BLOCK=block,
        num_warps=_num_warps(block),
    )
    return rstd_T


@triton.jit
def _rms_norm_backward(
    grad_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    residual_ptr,
    out_ptr,
    width,
    stride_grad,
    stride_x,
    stride_residual,
    stride_out,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    rstd = tl.load(rstd_ptr + row)
    grad = tl.load(grad_ptr + row * stride_grad + columns, mask=inside, other=0.0).to(tl.float32)
    grad *= tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    normed = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32) * rstd
    residual = tl.load(residual_ptr + row * stride_residual + columns, mask=inside, other=0.0).to(tl.float32)
    out = residual + rstd * (grad - normed * (tl.sum(grad * normed, axis=0) / width))
    tl.store(out_ptr + row * stride_out + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm_backward(
    grad_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    rstd_T: torch.Tensor,
    residual_TD: torch.Tensor,
    out_TD: torch.Tensor,
) -> None:
    num_rows, width = x_TD.shape
    block = triton.next_power_of_2(width)
    _rms_norm_backward[(num_rows,)](
        grad_TD,
        x_TD,
        weight_D,
        rstd_T,
        residual_TD,
        out_TD,
        width,
        grad_TD.stride(0),
        x_TD.stride(0),
        residual_TD.stride(0),
        out_TD.stride(0),
        BLOCK=block,
        num_warps=_num_warps(block),
    )


@triton.jit
def _rotate_heads(
    in_ptr,
    out_ptr,
    weight_ptr,
    cos_low,
    cos_high,
    sin_low,
    sin_high,
    num_heads,
    head_dim,
    stride_out_head,
    eps,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    heads = tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, HALF)[None, :]
    middle = head_dim // 2
    inside = (heads < num_heads) & (half < middle)
    dtype = in_ptr.dtype.element_ty
    low = tl.load(in_ptr + heads * head_dim + half, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(in_ptr + heads * head_dim + middle + half, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        rstd = (1.0 / tl.sqrt(squares / head_dim + eps))[:, None]
        weight_low = tl.load(weight_ptr + half, mask=half < middle, other=0.0).to(tl.float32)
        weight_high = tl.load(weight_ptr + middle + half, mask=half < middle, other=0.0).to(tl.float32)
        low = (low * rstd).to(dtype).to(tl.float32) * weight_low
        high = (high * rstd).to(dtype).to(tl.float32) * weight_high
    out = out_ptr + heads * stride_out_head + half
    tl.store(out, (low * cos_low - high * sin_low).to(dtype), mask=inside)
    tl.store(out + middle, (high * cos_high + low * sin_high).to(dtype), mask=inside)


@triton.jit
def _angles(cos_ptr, sin_ptr, row, stride_angle, middle, HALF: tl.constexpr):
    """Cosine and sine of both halves of a row's dimensions."""
    half = tl.arange(0, HALF)[None, :]
    inside = half < middle
    cos_ptr += row * stride_angle + half
    sin_ptr += row * stride_angle + half
    cos_low = tl.load(cos_ptr, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_ptr + middle, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_ptr, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_ptr + middle, mask=inside, other=0.0).to(tl.float32)
    return cos_low, cos_high, sin_low, sin_high


@triton.jit
def _rotate(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    query_weight_ptr,
    key_weight_ptr,
    query_ptr,
    key_ptr,
    num_query_heads,
    num_key_heads,
    head_dim,
    stride_qkv,
    stride_angle,
    query_eps,
    key_eps,
    HAS_NORM: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    middle = head_dim // 2
    cos_low, cos_high, sin_low, sin_high = _angles(cos_ptr, sin_ptr, row, stride_angle, middle, HALF)
    qkv_ptr += row * stride_qkv
    _rotate_heads(
        qkv_ptr,
        query_ptr + row * num_query_heads * head_dim,
        query_weight_ptr,
        cos_low,
        cos_high,
        sin_low,
        sin_high,
        num_query_heads,
        head_dim,
        head_dim,
        query_eps,
        HAS_NORM,
        QUERY_HEADS,
        HALF,
    )
    _rotate_heads(
        qkv_ptr + num_query_heads * head_dim,
        key_ptr + row * num_key_heads * head_dim,
        key_weight_ptr,
        cos_low,
        cos_high,
        sin_low,
        sin_high,
        num_key_heads,
        head_dim,
        head_dim,
        key_eps,
        HAS_NORM,
        KEY_HEADS,
        HALF,
    )


def rotate(
    qkv_TO: torch.Tensor,
    cos_TE: torch.Tensor,
    sin_TE: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: tuple[float, float],
    query_THE: torch.Tensor,
    key_TKE: torch.Tensor,
) -> None:
    num_rows, num_query_heads, head_dim = query_THE.shape
    num_key_heads = key_TKE.shape[1]
    query_weight, key_weight = norms or (qkv_TO, qkv_TO)
    _rotate[(num_rows,)](
        qkv_TO,
        cos_TE,
        sin_TE,
        query_weight,
        key_weight,
        query_THE,
        key_TKE,
        num_query_heads,
        num_key_heads,
        head_dim,
        qkv_TO.stride(0),
        cos_TE.stride(0),
        *eps,
        HAS_NORM=norms is not None,
        QUERY_HEADS=triton.next_power_of_2(num_query_heads),
        KEY_HEADS=triton.next_power_of_2(num_key_heads),
        HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )


@triton.jit
def _rotate_heads_backward(
    grad_ptr,
    in_ptr,
    out_ptr,
    weight_ptr,
    cos_low,
    cos_high,
    sin_low,
    sin_high,
    num_heads,
    head_dim,
    stride_grad_head,
    eps,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    heads = tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, HALF)[None, :]
    middle = head_dim // 2
    inside = (heads < num_heads) & (half < middle)
    grad = grad_ptr + heads * stride_grad_head + half
    grad_low = tl.load(grad, mask=inside, other=0.0).to(tl.float32)
    grad_high = tl.load(grad + middle, mask=inside, other=0.0).to(tl.float32)
    low = grad_low * cos_low + grad_high * sin_high
    high = grad_high * cos_high - grad_low * sin_low
    if HAS_NORM:
        x_low = tl.load(in_ptr + heads * head_dim + half, mask=inside, other=0.0).to(tl.float32)
        x_high = tl.load(in_ptr + heads * head_dim + middle + half, mask=inside, other=0.0).to(tl.float32)
        squares = tl.sum(x_low * x_low, axis=1) + tl.sum(x_high * x_high, axis=1)
        rstd = (1.0 / tl.sqrt(squares / head_dim + eps))[:, None]
        low *= tl.load(weight_ptr + half, mask=half < middle, other=0.0).to(tl.float32)
        high *= tl.load(weight_ptr + middle + half, mask=half < middle, other=0.0).to(tl.float32)
        x_low *= rstd
        x_high *= rstd
        mean = ((tl.sum(low * x_low, axis=1) + tl.sum(high * x_high, axis=1)) / head_dim)[:, None]
        low = rstd * (low - x_low * mean)
        high = rstd * (high - x_high * mean)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + heads * head_dim + half, low.to(dtype), mask=inside)
    tl.store(out_ptr + heads * head_dim + middle + half, high.to(dtype), mask=inside)


@triton.jit
def _rotate_backward(
    grad_query_ptr,
    grad_key_ptr,
    grad_value_ptr,
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    query_weight_ptr,
    key_weight_ptr,
    out_ptr,
    num_query_heads,
    num_key_heads,
    head_dim,
    stride_query_row,
    stride_query_head,
    stride_key_row,
    stride_key_head,
    stride_value_row,
    stride_value_head,
    stride_qkv,
    stride_angle,
    stride_out,
    query_eps,
    key_eps,
    HAS_NORM: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF)[None, :]
    middle = head_dim // 2
    cos_low, cos_high, sin_low, sin_high = _angles(cos_ptr, sin_ptr, row, stride_angle, middle, HALF)
    qkv_ptr += row * stride_qkv
    out_ptr += row * stride_out
    _rotate_heads_backward(
        grad_query_ptr + row * stride_query_row,
        qkv_ptr,
        out_ptr,
        query_weight_ptr,
        cos_low,
        cos_high,
        sin_low,
        sin_high,
        num_query_heads,
        head_dim,
        stride_query_head,
        query_eps,
        HAS_NORM,
        QUERY_HEADS,
        HALF,
    )
    keys = num_query_heads * head_dim
    _rotate_heads_backward(
        grad_key_ptr + row * stride_key_row,
        qkv_ptr + keys,
        out_ptr + keys,
        key_weight_ptr,
        cos_low,
        cos_high,
        sin_low,
        sin_high,
        num_key_heads,
        head_dim,
        stride_key_head,
        key_eps,
        HAS_NORM,
        KEY_HEADS,
        HALF,
    )
    heads = tl.arange(0, KEY_HEADS)[:, None]
    valid = (heads < num_key_heads) & (half < middle)
    grad_value = grad_value_ptr + row * stride_value_row + heads * stride_value_head + half
    out_value = out_ptr + keys + num_key_heads * head_dim + heads * head_dim + half
    dtype = out_ptr.dtype.element_ty
    tl.store(out_value, tl.load(grad_value, mask=valid, other=0.0).to(dtype), mask=valid)
    tl.store(out_value + middle, tl.load(grad_value + middle, mask=valid, other=0.0).to(dtype), mask=valid)


def rotate_backward(
    grad_query_THE: torch.Tensor,
    grad_key_TKE: torch.Tensor,
    grad_value_TKE: torch.Tensor,
    qkv_TO: torch.Tensor,
    cos_TE: torch.Tensor,
    sin_TE: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: tuple[float, float],
    out_TO: torch.Tensor,
) -> None:
    num_rows, num_query_heads, head_dim = grad_query_THE.shape
    num_key_heads = grad_key_TKE.shape[1]
    query_weight, key_weight = norms or (qkv_TO, qkv_TO)
    _rotate_backward[(num_rows,)](
        grad_query_THE,
        grad_key_TKE,
        grad_value_TKE,
        qkv_TO,
        cos_TE,
        sin_TE,
        query_weight,
        key_weight,
        out_TO,
        num_query_heads,
        num_key_heads,
        head_dim,
        *grad_query_THE.stride()[:2],
        *grad_key_TKE.stride()[:2],
        *grad_value_TKE.stride()[:2],
        qkv_TO.stride(0),
        cos_TE.stride(0),
        out_TO.stride(0),
        *eps,
        HAS_NORM=norms is not None,
        QUERY_HEADS=triton.next_power_of_2(num_query_heads),
        KEY_HEADS=triton.next_power_of_2(num_key_heads),
        HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )


@triton.jit
def _swiglu(both_ptr, out_ptr, width, stride_both, stride_out, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    both_ptr += row * stride_both
    gate = tl.load(both_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + width + columns, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * stride_out + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def swiglu(both_TO: torch.Tensor, out_TI: torch.Tensor) -> None:
    num_rows, width = out_TI.shape
    block = min(1024, triton.next_power_of_2(width))
    grid = (num_rows, triton.cdiv(width, block))
    _swiglu[grid](both_TO, out_TI, width, both_TO.stride(0), out_TI.stride(0), BLOCK=block, num_warps=4)


@triton.jit
def _swiglu_backward(both_ptr, grad_ptr, width, stride_both, stride_grad, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate_ptr = both_ptr + row * stride_both + columns
    grad_ptr += row * stride_grad + columns
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    dtype = both_ptr.dtype.element_ty
    tl.store(gate_ptr, (grad * up * (sigmoid + silu * (1.0 - sigmoid))).to(dtype), mask=inside)
    tl.store(gate_ptr + width, (grad * silu).to(dtype), mask=inside)
    tl.store(grad_ptr, (silu * up).to(dtype), mask=inside)


def swiglu_backward(both_TO: torch.Tensor, grad_TI: torch.Tensor) -> None:
    num_rows, width = grad_TI.shape
    block = min(1024, triton.next_power_of_2(width))
    grid = (num_rows, triton.cdiv(width, block))
    _swiglu_backward[grid](both_TO, grad_TI, width, both_TO.stride(0), grad_TI.stride(0), BLOCK=block, num_warps=4)


def _num_warps(block: int) -> int:
    return max(1, min(16, block // 512))
