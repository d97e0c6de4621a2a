"""The reduction of a chunk of logits in one Triton kernel: two readings and one writing of the chunk, in place.

Legend: C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def reduce(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    scale: float,
    softcap: float | None,
    factors_C: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the labels, whether each had the highest logit, and the gradient over the logits.

    Args:
        logits_CV: raw logits, contiguous; overwritten with their gradient when `factors_C` is given.
        factors_C: float32 upstream gradient of each log-probability.
    """
    num_rows, vocab_size = logits_CV.shape
    logprobs_C = torch.empty(num_rows, device=logits_CV.device)
    correct_C = torch.empty(num_rows, dtype=torch.bool, device=logits_CV.device)
    block = min(8192, triton.next_power_of_2(vocab_size))
    _reduce_row[(num_rows,)](
        logits_CV,
        labels_C,
        logprobs_C if factors_C is None else factors_C.contiguous(),
        logprobs_C,
        correct_C,
        vocab_size,
        logits_CV.stride(0),
        scale,
        0.0 if softcap is None else softcap,
        HAS_SOFTCAP=softcap is not None,
        HAS_GRAD=factors_C is not None,
        BLOCK=block,
        num_warps=16 if block >= 4096 else 4,
    )
    return logprobs_C, correct_C, logits_CV


@triton.jit
def _reduce_row(
    logits_ptr,
    labels_ptr,
    factors_ptr,
    logprobs_ptr,
    correct_ptr,
    vocab_size,
    stride,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    offsets = tl.arange(0, BLOCK)

    # online softmax: running maximum and sum of each lane, merged at the end
    maxima = tl.full((BLOCK,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        inside = start + offsets < vocab_size
        x = tl.load(logits_ptr + start + offsets, mask=inside, other=float("-inf")).to(tl.float32) * scale
        if HAS_SOFTCAP:
            x = softcap * (2.0 / (1.0 + tl.exp(-2.0 * x / softcap)) - 1.0)
            x = tl.where(inside, x, float("-inf"))
        new_maxima = tl.maximum(maxima, x)
        safe = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)
        sums = sums * tl.exp(maxima - safe) + tl.exp(x - safe)
        maxima = new_maxima
    maximum = tl.max(maxima, axis=0)
    total = tl.sum(sums * tl.exp(maxima - maximum), axis=0)

    at_label = tl.load(logits_ptr + label).to(tl.float32) * scale
    if HAS_SOFTCAP:
        at_label = softcap * (2.0 / (1.0 + tl.exp(-2.0 * at_label / softcap)) - 1.0)
    if HAS_GRAD:
        factor = tl.load(factors_ptr + row)
    tl.store(logprobs_ptr + row, at_label - maximum - tl.log(total))
    tl.store(correct_ptr + row, at_label >= maximum)

    if HAS_GRAD:
        tl.debug_barrier()  # at_label is read before any lane overwrites it
        for start in range(0, vocab_size, BLOCK):
            columns = start + offsets
            inside = columns < vocab_size
            raw = tl.load(logits_ptr + columns, mask=inside, other=0.0).to(tl.float32) * scale
            x = raw
            if HAS_SOFTCAP:
                tanh = 2.0 / (1.0 + tl.exp(-2.0 * raw / softcap)) - 1.0
                x = softcap * tanh
            grad = factor * (tl.where(columns == label, 1.0, 0.0) - tl.exp(x - maximum) / total)
            if HAS_SOFTCAP:
                grad *= 1.0 - tanh * tanh
            tl.store(logits_ptr + columns, (grad * scale).to(logits_ptr.dtype.element_ty), mask=inside)
