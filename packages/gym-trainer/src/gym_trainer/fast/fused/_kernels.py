"""The fused layer's kernels in Triton: each reads what it needs once and writes its result where the next one reads it.

Every tensor is a matrix of rows with unit stride inside a row and any stride between rows. Sums are float32.

Legend: T tokens, D hidden size, I width of a linear layer's input, O of its output, N columns of LoRA,
E head dimension.
"""

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
    half = tl.arange(0, HALF)[None, :]
    middle = head_dim // 2
    inside = half < middle
    cos_low = tl.load(cos_ptr + row * stride_angle + half, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_ptr + row * stride_angle + middle + half, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_ptr + row * stride_angle + half, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_ptr + row * stride_angle + middle + half, mask=inside, other=0.0).to(tl.float32)
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
    inside = half < middle
    cos_low = tl.load(cos_ptr + row * stride_angle + half, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_ptr + row * stride_angle + middle + half, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_ptr + row * stride_angle + half, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_ptr + row * stride_angle + middle + half, mask=inside, other=0.0).to(tl.float32)
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


@triton.jit
def _project(
    x_ptr,
    small_ptr,
    out_ptr,
    copy_ptr,
    num_rows,
    width,
    stride_x,
    stride_small_n,
    stride_small_k,
    stride_out,
    stride_copy,
    COPY: tl.constexpr,
    N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    lora = tl.arange(0, N)[None, :]
    inside_rows = rows < num_rows
    dtype = x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_T, N), dtype=tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = inside_rows & (k < width)[None, :]
        x = tl.load(x_ptr + rows * stride_x + k[None, :], mask=inside, other=0.0)
        if COPY:
            tl.store(copy_ptr + rows * stride_copy + k[None, :], x, mask=inside)
        small = tl.load(
            small_ptr + k[:, None] * stride_small_k + lora * stride_small_n, mask=(k < width)[:, None], other=0.0
        )
        total = tl.dot(x, small, total)
    tl.store(out_ptr + rows * stride_out + lora, total.to(dtype), mask=inside_rows)


PROJECT_BLOCKS = (64, 128, 4, 4)
"""Rows, columns, warps and stages of `project`."""


def project(x_TK: torch.Tensor, small_NK: torch.Tensor, out_TN: torch.Tensor, copy_TK: torch.Tensor | None) -> None:
    """`out = x @ small.T`, with `x` copied on the way where asked. N is a multiple of 16 and a power of two."""
    num_rows, width = x_TK.shape
    copy = x_TK if copy_TK is None else copy_TK
    block_t, block_k, num_warps, num_stages = PROJECT_BLOCKS
    _project[(triton.cdiv(num_rows, block_t),)](
        x_TK,
        small_NK,
        out_TN,
        copy,
        num_rows,
        width,
        x_TK.stride(0),
        small_NK.stride(0),
        small_NK.stride(1),
        out_TN.stride(0),
        copy.stride(0),
        COPY=copy_TK is not None,
        N=out_TN.shape[1],
        BLOCK_T=block_t,
        BLOCK_K=block_k,
        num_warps=num_warps,
        num_stages=num_stages,
    )


@triton.jit
def _reduce_rows(
    small_ptr,
    x_ptr,
    rstd_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    width,
    rows_per_split,
    stride_small,
    stride_x,
    HAS_NORM: tl.constexpr,
    N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    columns = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    split = tl.program_id(1)
    lora = tl.arange(0, N)
    inside_columns = columns < width
    dtype = x_ptr.dtype.element_ty
    total = tl.zeros((N, BLOCK_I), dtype=tl.float32)
    if HAS_NORM:
        weight = tl.load(weight_ptr + columns, mask=inside_columns, other=0.0).to(tl.float32)[None, :]
    begin = split * rows_per_split
    end = min(begin + rows_per_split, num_rows)
    for start in range(begin, end, BLOCK_T):
        rows = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        inside_rows = rows < end
        x = tl.load(
            x_ptr + rows[:, None] * stride_x + columns[None, :],
            mask=inside_rows[:, None] & inside_columns[None, :],
            other=0.0,
        )
        if HAS_NORM:
            rstd = tl.load(rstd_ptr + rows, mask=inside_rows, other=0.0)[:, None]
            x = ((x.to(tl.float32) * rstd).to(dtype).to(tl.float32) * weight).to(dtype)
        small = tl.load(small_ptr + rows[None, :] * stride_small + lora[:, None], mask=inside_rows[None, :], other=0.0)
        total = tl.dot(small, x, total)
    out = out_ptr + (split.to(tl.int64) * N + lora[:, None]) * width + columns[None, :]
    tl.store(out, total, mask=inside_columns[None, :])


REDUCE_BLOCKS = (64, 128, 4, 4)
"""Rows, columns, warps and stages of `reduce_rows`."""
_REDUCE_PROGRAMS = 528
"""Four for each multiprocessor of a large card."""


def reduce_rows(
    small_TN: torch.Tensor, x_TI: torch.Tensor, norm: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    """`small.T @ x`, float32 [N, I]. With `norm`, of the normalised `x`: reciprocal deviations [T] and weight [I].

    Parts of the rows are summed apart and then in a fixed order, so that the result is the same every time.
    """
    num_rows, width = x_TI.shape
    block_t, block_i, num_warps, num_stages = REDUCE_BLOCKS
    num_blocks = triton.cdiv(width, block_i)
    num_splits = max(1, min(triton.cdiv(num_rows, 4 * block_t), _REDUCE_PROGRAMS // num_blocks))
    rows_per_split = triton.cdiv(triton.cdiv(num_rows, num_splits), block_t) * block_t
    num_splits = triton.cdiv(num_rows, rows_per_split)
    parts = torch.empty(num_splits, small_TN.shape[1], width, device=x_TI.device, dtype=torch.float32)
    rstd, weight = norm or (x_TI, x_TI)
    _reduce_rows[(num_blocks, num_splits)](
        small_TN,
        x_TI,
        rstd,
        weight,
        parts,
        num_rows,
        width,
        rows_per_split,
        small_TN.stride(0),
        x_TI.stride(0),
        HAS_NORM=norm is not None,
        N=small_TN.shape[1],
        BLOCK_T=block_t,
        BLOCK_I=block_i,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return parts[0] if num_splits == 1 else parts.sum(0)


def _num_warps(block: int) -> int:
    return max(1, min(16, block // 512))
