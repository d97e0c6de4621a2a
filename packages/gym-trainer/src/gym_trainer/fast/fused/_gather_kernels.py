"""Many small matrices moved in one launch: LoRA's weights into the joined matrices, their gradients out of the sums.

A layer has fourteen of them, and a launch for each costs the device more than the copy.
"""

# Triton reads a kernel's parameters itself: their types are not Python's.
# pyright: reportMissingParameterType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@dataclass(frozen=True)
class Gradients:
    """Where each gradient lies in the parts of a sum, as a table on the device."""

    table: torch.Tensor
    """int64 [pieces, 6]: of A (0) or of B (1), first row of N, first column, rows, columns, place in the result."""
    scales: torch.Tensor
    num_elements: int
    most_elements: int


def gradients_of(
    pieces: Sequence[tuple[tuple[int, int, int, int, int, int], float]], device: torch.device
) -> Gradients:
    """`pieces`: rows of the table, and what each is multiplied by."""
    table = torch.tensor([row for row, _ in pieces], dtype=torch.int64, device=device)
    sizes = [row[3] * row[4] for row, _ in pieces]
    scales = torch.tensor([scale for _, scale in pieces], dtype=torch.float32, device=device)
    return Gradients(table, scales, sum(sizes), max(sizes))


@triton.jit
def _collect(
    a_ptr,
    b_ptr,
    table_ptr,
    scales_ptr,
    out_ptr,
    num_a_parts,
    num_b_parts,
    width_a,
    width_b,
    num_lora,
    BLOCK: tl.constexpr,
):
    piece = tl.program_id(0)
    row = table_ptr + piece * 6
    of_b = tl.load(row) == 1
    first_lora = tl.load(row + 1)
    first_column = tl.load(row + 2)
    num_rows = tl.load(row + 3)
    num_columns = tl.load(row + 4)
    out_ptr += tl.load(row + 5)
    scale = tl.load(scales_ptr + piece)
    index = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_rows * num_columns
    out_row = index // num_columns
    out_column = index % num_columns
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if of_b:  # transposed: a row of B is a column of the sum
        source = b_ptr + (first_lora + out_column) * width_b + first_column + out_row
        for _ in range(num_b_parts):
            total += tl.load(source, mask=inside, other=0.0)
            source += num_lora * width_b
    else:
        source = a_ptr + (first_lora + out_row) * width_a + first_column + out_column
        for _ in range(num_a_parts):
            total += tl.load(source, mask=inside, other=0.0)
            source += num_lora * width_a
    tl.store(out_ptr + index, (total * scale).to(out_ptr.dtype.element_ty), mask=inside)


def collect(parts_a_SNI: torch.Tensor, parts_b_SNO: torch.Tensor, where: Gradients, dtype: torch.dtype) -> torch.Tensor:
    """All gradients of a group one after another, added up and scaled."""
    out = torch.empty(where.num_elements, device=parts_a_SNI.device, dtype=dtype)
    _collect[(len(where.table), triton.cdiv(where.most_elements, _BLOCK))](
        parts_a_SNI,
        parts_b_SNO,
        where.table,
        where.scales,
        out,
        parts_a_SNI.shape[0],
        parts_b_SNO.shape[0],
        parts_a_SNI.shape[2],
        parts_b_SNO.shape[2],
        parts_a_SNI.shape[1],
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out


@triton.jit
def _scatter(sources_ptr, table_ptr, scales_ptr, source_like, target_like, BLOCK: tl.constexpr):
    piece = tl.program_id(0)
    row = table_ptr + piece * 4
    source = tl.load(sources_ptr + piece).to(tl.pointer_type(source_like.dtype.element_ty))
    target = tl.load(row).to(tl.pointer_type(target_like.dtype.element_ty))
    num_rows = tl.load(row + 1)
    num_columns = tl.load(row + 2)
    stride = tl.load(row + 3)
    scale = tl.load(scales_ptr + piece)
    index = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_rows * num_columns
    value = tl.load(source + index, mask=inside, other=0.0).to(tl.float32) * scale
    offset = index // num_columns * stride + index % num_columns
    tl.store(target + offset, value.to(target_like.dtype.element_ty), mask=inside)


class Scatter:
    """Copies contiguous matrices, scaled and cast, to places in others. The places stay, the sources may move."""

    def __init__(self, targets: Sequence[torch.Tensor], scales: Sequence[float]) -> None:
        """`targets`: views with unit stride inside a row, all of one dtype."""
        device = targets[0].device
        rows = [(t.data_ptr(), *t.shape, t.stride(0)) for t in targets]
        self._targets = targets[0]
        self._table = torch.tensor(rows, dtype=torch.int64, device=device)
        self._scales = torch.tensor(scales, dtype=torch.float32, device=device)
        self._most_elements = max(t.numel() for t in targets)
        self._pointers: list[int] = []
        self._sources = self._table

    def __call__(self, sources: Sequence[torch.Tensor]) -> None:
        """One source for each target, all of one dtype."""
        pointers = [source.data_ptr() for source in sources]
        if pointers != self._pointers:
            self._pointers = pointers
            self._sources = torch.tensor(pointers, dtype=torch.int64, device=self._table.device)
        _scatter[(len(pointers), triton.cdiv(self._most_elements, _BLOCK))](
            self._sources, self._table, self._scales, sources[0], self._targets, BLOCK=_BLOCK, num_warps=4
        )
