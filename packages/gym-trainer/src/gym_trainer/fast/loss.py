"""Cross-entropy and log-probabilities of a linear output head, without ever holding all logits.

A vocabulary of 150,000 makes the logits of 8,192 tokens 5 GB in float32, several times over in a plain loss. Here only
`chunk_size` rows of them exist at once, and only rows that have a label are multiplied with the head at all.

- `linear_cross_entropy` computes the gradients in the forward pass, chunk by chunk: the loss is a sum, so its upstream
  gradient is one number that can be multiplied in later. No product is done twice.
- `linear_logprobs` gives one number a token, whose upstream gradients are known in the backward pass only; it computes
  the logits of each chunk again there. Preference objectives are built on it.

Both take a frozen or a trained head, a bias, a logit scale (Cohere, Granite) and soft-capped logits (Gemma). Logits are
computed in the head's dtype and reduced in float32, as transformers does. On CUDA the reduction is one Triton kernel
(`gym_trainer.fast._loss_kernel`); elsewhere plain torch.

Legend: T tokens, C tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

IGNORE = -100
_DEFAULT_CHUNK_BYTES = {"cpu": 2**26, "cuda": 5 * 2**27}


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """What turns hidden states into logits: `softcap(scale * (hidden @ weight.T + bias))`."""

    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    """Logits become `softcap * tanh(logits / softcap)`."""


class CrossEntropy(NamedTuple):
    """A loss before it is divided by the step's normaliser."""

    loss_sum: torch.Tensor
    """float32 scalar: the summed negative log-probability of the labels, in nats."""
    num_correct: torch.Tensor
    """int64 scalar: the labels whose logit was the highest. Not differentiable."""
    num_tokens: int
    """The labels that counted."""


def linear_cross_entropy(
    hidden_TD: torch.Tensor,
    head: OutputHead | torch.Tensor,
    labels_T: torch.Tensor,
    *,
    weights_T: torch.Tensor | None = None,
    chunk_size: int | None = None,
) -> CrossEntropy:
    """The summed cross-entropy of a linear head.

    Args:
        hidden_TD: the hidden states after the model's last norm.
        head: the output head, or its weight [V, D].
        labels_T: int64, the token that each hidden state predicts (see `loop.batch.shifted_labels`); -100 where none.
            Kept on the host, they cost no wait for the device.
        weights_T: float, a factor for each token's loss.
        chunk_size: rows of logits held at once; when not given, as many as would take 640 MB in float32 on CUDA, and
            64 MB on a processor.
    """
    head = _as_head(head)
    rows, labels, num_tokens = _trained_rows(labels_T, hidden_TD.device)
    weights = None if weights_T is None else weights_T.to(hidden_TD.device, torch.float32)[rows]
    chunk_size = chunk_size or default_chunk_size(head.weight_VD)
    loss_sum, num_correct = _CrossEntropy.apply(
        hidden_TD[rows],
        head.weight_VD,
        head.bias_V,
        labels,
        weights,
        _Shape.of(head),
        chunk_size,
        torch.is_grad_enabled(),
    )
    return CrossEntropy(loss_sum, num_correct, num_tokens)


def linear_logprobs(
    hidden_TD: torch.Tensor,
    head: OutputHead | torch.Tensor,
    labels_T: torch.Tensor,
    *,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """The log-probability of each label: float32 [T], 0 where the label is -100. See `linear_cross_entropy`."""
    head = _as_head(head)
    rows, labels, _ = _trained_rows(labels_T, hidden_TD.device)
    chunk_size = chunk_size or default_chunk_size(head.weight_VD)
    logprobs = _LogProbs.apply(hidden_TD[rows], head.weight_VD, head.bias_V, labels, _Shape.of(head), chunk_size)
    return torch.zeros(hidden_TD.shape[0], device=hidden_TD.device).index_put((rows,), logprobs)


def default_chunk_size(weight_VD: torch.Tensor) -> int:
    """Rows whose float32 logits would take up to 640 MB on CUDA, 64 MB on a processor, whose caches are small."""
    kind = "cpu" if weight_VD.device.type == "cpu" else "cuda"
    multiple = {"cpu": 64, "cuda": 256}[kind]
    return max(multiple, _DEFAULT_CHUNK_BYTES[kind] // (4 * weight_VD.shape[0]) // multiple * multiple)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Products in the dtypes that they are given; for devices without autocast, nothing."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _as_head(head: OutputHead | torch.Tensor) -> OutputHead:
    return OutputHead(weight_VD=head) if isinstance(head, torch.Tensor) else head


def _trained_rows(labels_T: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
    rows = (labels_T != IGNORE).nonzero()[:, 0]
    labels = labels_T[rows]
    return rows.to(device, non_blocking=True), labels.to(device, non_blocking=True), rows.shape[0]


@dataclass(frozen=True)
class _Shape:
    """The part of a head that is not a tensor."""

    scale: float
    softcap: float | None = field(default=None)

    @classmethod
    def of(cls, head: OutputHead) -> _Shape:
        return cls(head.scale, head.softcap)


def _logits(hidden_CD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
    if bias_V is None:
        return hidden_CD @ weight_VD.T
    return torch.addmm(bias_V, hidden_CD, weight_VD.T)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_T: torch.Tensor,
        weights_T: torch.Tensor | None,
        shape: _Shape,
        chunk_size: int,
        grad_enabled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with without_autocast(hidden_TD.device):
            weight = weight_VD.to(hidden_TD.dtype)
            bias = None if bias_V is None else bias_V.to(hidden_TD.dtype)
            needed = [grad_enabled and need for need in ctx.needs_input_grad[:3]]
            grads = _Gradients(hidden_TD, weight, bias, *needed)
            logprobs_T = torch.empty(hidden_TD.shape[0], device=hidden_TD.device)
            num_correct = torch.zeros((), dtype=torch.int64, device=hidden_TD.device)
            for start in range(0, hidden_TD.shape[0], chunk_size):
                chunk = slice(start, start + chunk_size)
                factors_C = -torch.ones_like(logprobs_T[chunk]) if weights_T is None else -weights_T[chunk]
                logits_CV = _logits(hidden_TD[chunk], weight, bias)
                reduced = _reduce(logits_CV, labels_T[chunk], shape, factors_C if any(grads.needed) else None)
                logprobs_T[chunk] = reduced.logprobs_C
                num_correct += reduced.correct_C.sum()
                if any(grads.needed):
                    grads.add(chunk, reduced.grad_logits_CV)
                del logits_CV, reduced
        ctx.dtypes = (hidden_TD.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        ctx.save_for_backward(grads.hidden_TD, grads.weight_VD, grads.bias_V)
        ctx.mark_non_differentiable(num_correct)
        losses_T = -logprobs_T if weights_T is None else -logprobs_T * weights_T
        return losses_T.sum(), num_correct

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = (
            None if grad is None else (grad * grad_loss.to(grad.dtype)).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*grads, None, None, None, None, None)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_T: torch.Tensor,
        shape: _Shape,
        chunk_size: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, labels_T)
        ctx.shape, ctx.chunk_size = shape, chunk_size
        logprobs_T = torch.empty(hidden_TD.shape[0], device=hidden_TD.device)
        with without_autocast(hidden_TD.device):
            weight = weight_VD.to(hidden_TD.dtype)
            bias = None if bias_V is None else bias_V.to(hidden_TD.dtype)
            for start in range(0, hidden_TD.shape[0], chunk_size):
                chunk = slice(start, start + chunk_size)
                logits_CV = _logits(hidden_TD[chunk], weight, bias)
                logprobs_T[chunk] = _reduce(logits_CV, labels_T[chunk], shape, None).logprobs_C
                del logits_CV
        return logprobs_T

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TD, weight_VD, bias_V, labels_T = ctx.saved_tensors
        with without_autocast(hidden_TD.device):
            weight = weight_VD.to(hidden_TD.dtype)
            bias = None if bias_V is None else bias_V.to(hidden_TD.dtype)
            grads = _Gradients(hidden_TD, weight, bias, *ctx.needs_input_grad[:3])
            for start in range(0, hidden_TD.shape[0], ctx.chunk_size):
                chunk = slice(start, start + ctx.chunk_size)
                logits_CV = _logits(hidden_TD[chunk], weight, bias)
                reduced = _reduce(logits_CV, labels_T[chunk], ctx.shape, grad_T[chunk])
                grads.add(chunk, reduced.grad_logits_CV)
                del logits_CV, reduced
        grad_weight = None if grads.weight_VD is None else grads.weight_VD.to(weight_VD.dtype)
        grad_bias = None if grads.bias_V is None else grads.bias_V.to(bias_V.dtype)
        return (grads.hidden_TD, grad_weight, grad_bias, None, None, None)


class _Gradients:
    """Gradients of the inputs, filled chunk by chunk. The head's are summed in float32: many chunks add to them."""

    def __init__(
        self,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        need_hidden: bool,
        need_weight: bool,
        need_bias: bool,
    ) -> None:
        self._inputs = (hidden_TD, weight_VD)
        self.needed = (need_hidden, need_weight, need_bias)
        sum_dtype = torch.promote_types(weight_VD.dtype, torch.float32)
        self.hidden_TD = torch.empty_like(hidden_TD) if need_hidden else None
        self.weight_VD = torch.zeros_like(weight_VD, dtype=sum_dtype) if need_weight else None
        self.bias_V = torch.zeros_like(bias_V, dtype=sum_dtype) if need_bias and bias_V is not None else None

    def add(self, chunk: slice, grad_logits_CV: torch.Tensor) -> None:
        hidden_TD, weight_VD = self._inputs
        if self.hidden_TD is not None:
            torch.mm(grad_logits_CV, weight_VD, out=self.hidden_TD[chunk])
        if self.weight_VD is not None:
            if self.weight_VD.dtype == weight_VD.dtype:
                self.weight_VD.addmm_(grad_logits_CV.T, hidden_TD[chunk])
            elif self.weight_VD.is_cuda:
                torch.addmm(
                    self.weight_VD,
                    grad_logits_CV.T,
                    hidden_TD[chunk],
                    out_dtype=self.weight_VD.dtype,
                    out=self.weight_VD,
                )
            else:
                self.weight_VD += grad_logits_CV.T @ hidden_TD[chunk]
        if self.bias_V is not None:
            self.bias_V += grad_logits_CV.sum(0, dtype=self.bias_V.dtype)


class _Reduced(NamedTuple):
    logprobs_C: torch.Tensor
    correct_C: torch.Tensor
    grad_logits_CV: torch.Tensor
    """Written over the logits; meaningful only when factors were given."""


def _reduce(logits_CV: torch.Tensor, labels_C: torch.Tensor, shape: _Shape, factors_C: torch.Tensor | None) -> _Reduced:
    """Log-probabilities of the labels and, given the upstream gradient of each, the gradient of the raw logits."""
    if logits_CV.is_cuda and logits_CV.dtype != torch.float64 and _has_triton():
        from gym_trainer.fast import _loss_kernel

        return _Reduced(*_loss_kernel.reduce(logits_CV, labels_C, shape.scale, shape.softcap, factors_C))
    if logits_CV.is_meta and logits_CV.dtype in (torch.bfloat16, torch.float16):
        # a plan's simulation of the kernel above: it writes over the logits and makes nothing large
        logprobs_C = torch.empty(logits_CV.shape[0], device=logits_CV.device)
        return _Reduced(logprobs_C, torch.empty_like(labels_C, dtype=torch.bool), logits_CV.mul_(1))
    return _reduce_torch(logits_CV, labels_C, shape, factors_C)


def _reduce_torch(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, shape: _Shape, factors_C: torch.Tensor | None
) -> _Reduced:
    dtype = logits_CV.dtype
    values_CV = logits_CV.to(torch.promote_types(dtype, torch.float32))
    if shape.scale != 1.0:
        values_CV = values_CV * shape.scale
    capped_CV = None
    if shape.softcap is not None:
        capped_CV = torch.tanh(values_CV / shape.softcap)
        values_CV = capped_CV * shape.softcap
    maxima_C1, best_C1 = values_CV.max(dim=1, keepdim=True)
    values_CV = values_CV.sub_(maxima_C1) if values_CV is not logits_CV else values_CV - maxima_C1
    label_values_C1 = values_CV.gather(1, labels_C[:, None])
    values_CV.exp_()
    sums_C1 = values_CV.sum(dim=1, keepdim=True)
    logprobs_C = (label_values_C1 - sums_C1.log())[:, 0].float()
    correct_C = best_C1[:, 0] == labels_C
    if factors_C is None:
        return _Reduced(logprobs_C, correct_C, logits_CV)
    # d logprob(label) / d logits = onehot(label) - softmax
    factors_C1 = factors_C[:, None].to(values_CV.dtype)
    grad_CV = values_CV.mul_(-factors_C1 / sums_C1)
    grad_CV.scatter_add_(1, labels_C[:, None], factors_C1)
    if capped_CV is not None:
        grad_CV *= 1 - capped_CV.square()
    if shape.scale != 1.0:
        grad_CV *= shape.scale
    return _Reduced(logprobs_C, correct_C, grad_CV.to(dtype))
