"""The divergence of two models' next-token distributions, without ever holding all logits of either.

The logits of a chunk of positions are made for both, compared, and made again in the backward pass.

Legend: K positions with a label, C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd"]

Logits = Callable[[slice], Tensor]
"""The logits [C, V] of some positions, of all K in order."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Sums over positions."""

    divergence_sum: Tensor
    """In nats."""
    cross_entropy_sum: Tensor
    """Of the student with the labels."""
    num_correct: Tensor
    """Labels whose logit was the student's highest."""


def compare(
    student: Logits,
    teacher: Logits,
    labels_K: Tensor,
    *,
    imitated_K: Tensor | None = None,
    kind: DivergenceKind,
    beta: float = 0.5,
    temperature: float = 1.0,
    chunk_size: int,
) -> Comparison:
    """The divergence of the student from the teacher, added up over positions (see `divergence`).

    `imitated_K` says where the labels are examples, and count for the cross-entropy and what is right; all when None.

    Where the two have logits for different numbers of tokens, as padded vocabularies do, only the shared ones count.
    """
    sums = [labels_K.new_zeros((), dtype=torch.float64 if labels_K.device.type != "mps" else torch.float32)] * 3

    def chunk_sums(chunk: slice) -> tuple[Tensor, Tensor, Tensor]:
        own_CV, other_CV = student(chunk).float(), teacher(chunk).float()
        shared = min(own_CV.shape[-1], other_CV.shape[-1])
        divergence_C = divergence(
            (own_CV[:, :shared] / temperature).log_softmax(-1),
            (other_CV[:, :shared] / temperature).log_softmax(-1),
            kind,
            beta,
        )
        losses_C = torch.nn.functional.cross_entropy(own_CV, labels_K[chunk], reduction="none")
        correct_C = own_CV.argmax(-1) == labels_K[chunk]
        if imitated_K is not None:
            losses_C, correct_C = losses_C * imitated_K[chunk], correct_C & imitated_K[chunk]
        return divergence_C.sum(), losses_C.sum(), correct_C.sum()

    for begin in range(0, len(labels_K), chunk_size):
        chunk = slice(begin, begin + chunk_size)
        if torch.is_grad_enabled():
            added = checkpoint(chunk_sums, chunk, use_reentrant=False, preserve_rng_state=False)
        else:
            added = chunk_sums(chunk)
        sums = [total + part for total, part in zip(sums, added, strict=True)]
    return Comparison(*sums)


def divergence(student_CV: Tensor, teacher_CV: Tensor, kind: DivergenceKind, beta: float = 0.5) -> Tensor:
    """Of log-probabilities, for each position [C]: forward KL(teacher || student), reverse KL(student || teacher), or
    beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta teacher + (1 - beta) student (arXiv 2306.13649,
    equation 1)."""
    if kind == "forward_kl":
        return _kl(teacher_CV, student_CV)
    if kind == "reverse_kl":
        return _kl(student_CV, teacher_CV)
    mixture_CV = torch.logaddexp(teacher_CV + math.log(beta), student_CV + math.log1p(-beta))
    return beta * _kl(teacher_CV, mixture_CV) + (1 - beta) * _kl(student_CV, mixture_CV)


def _kl(p_CV: Tensor, q_CV: Tensor) -> Tensor:
    """KL(p || q) from log-probabilities; a probability of 0 counts nothing."""
    return torch.nn.functional.kl_div(q_CV, p_CV, reduction="none", log_target=True).sum(-1)
