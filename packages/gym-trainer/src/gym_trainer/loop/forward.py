"""The model as an objective calls it: trained positions in, cross-entropy or log-probabilities out.

Shapes: T positions of a micro-batch, K of them with a label, D hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from gym_serve.models.load import SCORE_HEAD
from gym_trainer.fast.head import HeadNotLinear, logits_of, split
from gym_trainer.fast.loss import CrossEntropy, OutputHead, linear_cross_entropy, linear_logprobs
from gym_trainer.loop.batch import IGNORED, MicroBatch


class ForwardModel:
    """A causal language model, bare, with adapters, or wrapped for several devices.

    The head's product with the hidden states is the largest tensor of a step, so it is made in chunks and only where
    there is a label. The body's output is caught by a hook while the wrapped model runs whole, with logits for one
    position only: so autocast and sharding work as they do for everyone. A model whose logits are not a known function
    of its last hidden states gives its own logits instead.
    """

    def __init__(self, model: nn.Module, *, loss_chunk_size: int | None = None) -> None:
        """`loss_chunk_size`: rows of logits held at once; chosen by the vocabulary when None."""
        self.wrapped = model
        self.loss_chunk_size = loss_chunk_size
        unwrapped = unwrap(model)
        causal = unwrapped.get_base_model() if hasattr(unwrapped, "get_base_model") else unwrapped
        self._keeps_logits = "logits_to_keep" in inspect.signature(causal.forward).parameters
        self.body: nn.Module | None = None
        self.head: OutputHead | None = None
        with suppress(HeadNotLinear):
            self.body, self.head = split(unwrapped)
        self._scorer: nn.Module | None = getattr(causal, SCORE_HEAD, None)
        if self._scorer is not None:
            self.body = getattr(causal, causal.base_model_prefix)

    def cross_entropy(self, batch: MicroBatch, *, weights_T: Tensor | None = None) -> CrossEntropy:
        """Summed next-token loss over the labelled positions, and how many of them were predicted right."""
        if self.head is not None:
            return linear_cross_entropy(
                self.hidden(batch), self.head, batch.labels_T, weights_T=weights_T, chunk_size=self.loss_chunk_size
            )
        positions_K, labels_K, logits_KV = self._labelled_logits(batch)
        losses_K = nn.functional.cross_entropy(logits_KV, labels_K, reduction="none")
        if weights_T is not None:
            losses_K = losses_K * weights_T.to(losses_K.device)[positions_K]
        num_correct = (logits_KV.detach().argmax(-1) == labels_K).sum()
        return CrossEntropy(loss_sum=losses_K.sum(), num_correct=num_correct, num_tokens=len(labels_K))

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Each label's log-probability: float32 [T], 0 where there is no label."""
        if self.head is not None:
            return linear_logprobs(self.hidden(batch), self.head, batch.labels_T, chunk_size=self.loss_chunk_size)
        positions_K, labels_K, logits_KV = self._labelled_logits(batch)
        logprobs_K = -nn.functional.cross_entropy(logits_KV, labels_K, reduction="none")
        return torch.zeros(len(batch.labels_T), device=logprobs_K.device).index_put((positions_K,), logprobs_K)

    def labelled_logits(self, batch: MicroBatch) -> tuple[Callable[[slice], Tensor], Tensor]:
        """A function that makes the logits [C, V] of some of the K labelled positions, and their labels [K]."""
        if self.head is None:
            _, labels_K, logits_KV = self._labelled_logits(batch)
            return logits_KV.__getitem__, labels_K
        head, device = self.head, batch.input_ids.device
        positions_K = torch.nonzero(batch.labels_T != IGNORED).squeeze(1).to(device)
        hidden_KD = self.hidden(batch)[positions_K]
        return lambda chunk: logits_of(hidden_KD[chunk], head), batch.labels_T.to(device)[positions_K]

    def scores(self, batch: MicroBatch) -> Tensor:
        """What a sequence classifier's head says at each document's last token: [D, labels].

        transformers' own classifiers look for the last token that is not padding, by its id; a packed row has several
        last tokens, and where padding is the end-of-turn token that is one token early.
        """
        assert self._scorer is not None
        hidden_ND = self.hidden(batch)[batch.last_positions_D.to(batch.input_ids.device)]
        scores = self._scorer(hidden_ND.to(next(self._scorer.parameters()).dtype))
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def hidden(self, batch: MicroBatch) -> Tensor:
        """What the head would read: [T, D] in the order of `batch.labels_T`."""
        assert self.body is not None
        caught: list[Tensor] = []

        def catch(_module: nn.Module, _args: Any, output: Any) -> None:
            caught.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

        handle = self.body.register_forward_hook(catch)
        try:
            self.wrapped(**batch.model_inputs(), **({"logits_to_keep": 1} if self._keeps_logits else {}))
        finally:
            handle.remove()
        return caught[0].flatten(0, 1)

    def _labelled_logits(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Positions with a label, their labels, and the model's own logits there, float32 [K, V] or wider."""
        positions_K = torch.nonzero(batch.labels_T != IGNORED).squeeze(1).to(batch.input_ids.device)
        labels_K = batch.labels_T.to(batch.input_ids.device)[positions_K]
        if self._keeps_logits and batch.layout != "padded":
            logits_KV = self.wrapped(**batch.model_inputs(), logits_to_keep=positions_K).logits[0]
        else:
            logits_KV = self.wrapped(**batch.model_inputs()).logits.flatten(0, 1)[positions_K]
        return positions_K, labels_K, logits_KV.to(torch.promote_types(logits_KV.dtype, torch.float32))


def unwrap(model: nn.Module) -> Any:
    """The model inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model
