"""LoRA's small products in Triton, made while something else is read or written anyway.

Every tensor is a matrix of rows with unit stride inside a row and any stride between rows, unless said otherwise. Sums
are float32. Small matrices have 16, 32 or 64 columns.

Legend: T tokens, I width of a linear layer's input, O of its output, N columns of LoRA, S parts of a sum.
"""

# Triton reads a kernel's parameters itself: their types are not Python's.
# pyright: reportMissingParameterType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_COLUMNS = 64
"""Beyond, the device's own matrix product takes over."""
PROJECT_BLOCKS = (64, 64, 4, 5)
"""Rows, columns, warps and stages. With 128 columns and several stages a warp without rows, which waits for nothing,
writes what comes next over what the others still read: up to 40% wrong, differently every time (Triton 3.6, H200)."""
REDUCE_BLOCKS = (32, 256, 4, 4)
_REDUCE_PROGRAMS = 264
"""Two for each multiprocessor of a large card."""


@triton.jit
def _project(
    x_ptr,
    small_ptr,
    out_ptr,
    second_ptr,
    copy_ptr,
    num_rows,
    width,
    stride_x,
    stride_small_n,
    stride_small_k,
    stride_out,
    stride_second,
    stride_copy,
    SECOND: tl.constexpr,
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
    if SECOND:
        tl.store(second_ptr + rows * stride_second + lora, total.to(dtype), mask=inside_rows)


def project(
    x_TI: torch.Tensor,
    small_NI: torch.Tensor,
    out_TN: torch.Tensor,
    copy_TI: torch.Tensor | None,
    second_TN: torch.Tensor | None,
) -> None:
    """`x @ small.T`, written once or twice, with `x` copied on the way where asked. `small` may be a transposed one."""
    num_rows, width = x_TI.shape
    copy = x_TI if copy_TI is None else copy_TI
    second = out_TN if second_TN is None else second_TN
    block_t, block_k, num_warps, num_stages = PROJECT_BLOCKS
    _project[(triton.cdiv(num_rows, block_t),)](
        x_TI,
        small_NI,
        out_TN,
        second,
        copy,
        num_rows,
        width,
        x_TI.stride(0),
        small_NI.stride(0),
        small_NI.stride(1),
        out_TN.stride(0),
        second.stride(0),
        copy.stride(0),
        SECOND=second_TN is not None,
        COPY=copy_TI is not None,
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


def reduce_rows(
    small_TN: torch.Tensor, x_TI: torch.Tensor, norm: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    """`small.T @ x` in parts that are still to be added up, float32 [S, N, I]: so it comes out the same every time.

    With `norm`, of the normed `x`: 1 / root mean square [T] and weight [I].
    """
    num_rows, width = x_TI.shape
    block_t, block_i, num_warps, num_stages = REDUCE_BLOCKS
    num_blocks = triton.cdiv(width, block_i)
    num_splits = max(1, min(triton.cdiv(num_rows, 4 * block_t), _REDUCE_PROGRAMS // num_blocks))
    rows_per_split = triton.cdiv(triton.cdiv(num_rows, num_splits), block_t) * block_t
    num_splits = triton.cdiv(num_rows, rows_per_split)
    parts_SNI = torch.empty(num_splits, small_TN.shape[1], width, device=x_TI.device, dtype=torch.float32)
    rstd, weight = norm or (x_TI, x_TI)
    _reduce_rows[(num_blocks, num_splits)](
        small_TN,
        x_TI,
        rstd,
        weight,
        parts_SNI,
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
    return parts_SNI
