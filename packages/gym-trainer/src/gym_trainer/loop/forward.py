"""The model as an objective calls it: trained positions in, cross-entropy or log-probabilities out.

Shapes: T positions of a micro-batch, K of them with a label, D hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gym_trainer.loop.batch import IGNORED, MicroBatch


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Sums over the labelled positions of a micro-batch."""

    loss_sum: Tensor
    num_correct: Tensor
    num_tokens: Tensor


class ForwardModel:
    """A causal language model, bare, with adapters, or wrapped for several devices.

    The head's product with the hidden states is the largest tensor of a step, so it is made in chunks and only where
    there is a label. That needs the head apart from the body: the body's output is caught by a hook while the model
    runs whole, with logits for one position only. A model whose logits are more than `hidden @ weight` (soft-capped,
    scaled, with a bias or an adapter in the head) is found by a probe, and gives its own logits instead.
    """

    def __init__(self, model: nn.Module, *, chunk_size: int = 4096) -> None:
        self.wrapped = model
        self.causal = _causal_model(model)
        self.body: nn.Module = self.causal.base_model
        self.head: nn.Module = self.causal.get_output_embeddings()
        self.chunk_size = chunk_size
        self._keeps_logits = "logits_to_keep" in inspect.signature(self.causal.forward).parameters
        self._head_is_plain: bool | None = None

    @property
    def head_is_plain(self) -> bool:
        """Whether the logits are the hidden states times the head's weight, and nothing else. None before a probe."""
        if self._head_is_plain is None:
            self._head_is_plain = self._probe_head()
        return self._head_is_plain

    def cross_entropy(self, batch: MicroBatch) -> CrossEntropy:
        """Summed next-token loss over the labelled positions, and how many of them were predicted right."""
        positions_K = torch.nonzero(batch.labels_T != IGNORED).squeeze(1)
        labels_K = batch.labels_T[positions_K]
        num_tokens = torch.tensor(float(len(labels_K)), device=labels_K.device)
        if self.head_is_plain:
            hidden_KD = self.hidden(batch)[positions_K]
            loss_sum, num_correct = linear_cross_entropy(hidden_KD, self.head.weight, labels_K, self.chunk_size)
        else:
            logits_KV = self.logits(batch, positions_K).float()
            loss_sum = nn.functional.cross_entropy(logits_KV, labels_K, reduction="sum")
            num_correct = (logits_KV.detach().argmax(-1) == labels_K).sum()
        return CrossEntropy(loss_sum=loss_sum, num_correct=num_correct.float(), num_tokens=num_tokens)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """What the head would read: [T, D] in the order of `batch.labels_T`."""
        caught: list[Tensor] = []

        def catch(_module: nn.Module, _args: Any, output: Any) -> None:
            caught.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

        handle = self.body.register_forward_hook(catch)
        try:
            self.wrapped(**batch.model_inputs(), logits_to_keep=1)
        finally:
            handle.remove()
        return caught[0].flatten(0, 1)

    def logits(self, batch: MicroBatch, positions_K: Tensor) -> Tensor:
        """The model's own logits at some positions, [K, V]."""
        if self._keeps_logits and batch.layout == "packed":
            return self.wrapped(**batch.model_inputs(), logits_to_keep=positions_K).logits[0]
        return self.wrapped(**batch.model_inputs()).logits.flatten(0, 1)[positions_K]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The model without its adapter: what a preference method compares with."""
        disable = getattr(_unwrap(self.wrapped), "disable_adapter", None)
        if disable is None:
            raise AssertionError("a fully trained model has no adapter to switch off")
        with disable():
            yield

    @torch.no_grad()
    def _probe_head(self) -> bool:
        """Feed the head's output a known ramp: a plain model returns it unchanged, and fed the head what the body made.

        Large values show soft-capping and scaling that ordinary logits of an untrained model would hide in rounding.
        """
        if not self._keeps_logits or type(self.head) is not nn.Linear or self.head.bias is not None:
            return False
        seen: dict[str, Tensor] = {}
        vocabulary_size = self.head.weight.shape[0]

        def catch_body(_module: nn.Module, _args: Any, output: Any) -> None:
            seen["hidden"] = output[0] if isinstance(output, tuple) else output.last_hidden_state

        def replace_logits(_module: nn.Module, args: Any, output: Tensor) -> Tensor:
            seen["head_input"] = args[0]
            ramp_V = torch.linspace(-1000, 1000, vocabulary_size, device=output.device).to(output.dtype)
            seen["ramp"] = ramp_V.expand_as(output)
            return seen["ramp"]

        handles = [self.body.register_forward_hook(catch_body), self.head.register_forward_hook(replace_logits)]
        was_training = self.causal.training
        self.causal.eval()
        try:
            ids = torch.arange(4, device=self.head.weight.device)[None]
            length = torch.tensor([0, 4], dtype=torch.int32, device=ids.device)
            packed = {"cu_seq_lens_q": length, "cu_seq_lens_k": length, "max_length_q": 4, "max_length_k": 4}
            positions = torch.arange(4, device=ids.device)[None]
            output = self.causal(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1, **packed)
        finally:
            self.causal.train(was_training)
            for handle in handles:
                handle.remove()
        if "hidden" not in seen or "ramp" not in seen:
            return False
        return torch.equal(output.logits, seen["ramp"].to(output.logits.dtype)) and torch.equal(
            seen["head_input"], seen["hidden"][:, -1:].to(seen["head_input"].dtype)
        )


def linear_cross_entropy(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """The summed loss and the number of right predictions, from logits made `chunk_size` positions at a time."""
    loss_sum = hidden_TD.new_zeros((), dtype=torch.float32)
    num_correct = torch.zeros((), dtype=torch.int64, device=hidden_TD.device)
    for hidden, labels in zip(hidden_TD.split(chunk_size), labels_T.split(chunk_size), strict=True):
        logits = nn.functional.linear(hidden, weight_VD).float()
        loss_sum = loss_sum + nn.functional.cross_entropy(logits, labels, reduction="sum")
        num_correct = num_correct + (logits.detach().argmax(-1) == labels).sum()
    return loss_sum, num_correct


def _unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None) or (
            model.module if isinstance(model, nn.parallel.DistributedDataParallel) else None
        )
        if inner is None:
            return model
        model = inner


def _causal_model(model: nn.Module) -> Any:
    """The transformers model inside wrappers and adapters."""
    model = _unwrap(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model
