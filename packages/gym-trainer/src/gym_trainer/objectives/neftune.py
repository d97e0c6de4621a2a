"""Noise on the embeddings while training (NEFTune, arXiv 2310.05914).

Shapes: R x L positions of a micro-batch, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gym_trainer.loop.batch import MicroBatch
from gym_trainer.loop.forward import ForwardModel, unwrap


@contextmanager
def noisy_embeddings(model: ForwardModel, batch: MicroBatch, alpha: float) -> Iterator[None]:
    """Adds uniform noise within +-alpha / sqrt(length x width) to what the embedding layer gives.

    The length is the document's own, not the packed row's, so that packing does not quieten the noise.
    """
    lengths = [len(document.ids) for row in batch.rows for document in row.documents]
    lengths_D = torch.tensor(lengths, dtype=torch.float32, device=batch.input_ids.device)
    lengths_RL = lengths_D[batch.document_ids_T.clamp(min=0)].view(batch.input_ids.shape)

    def add_noise(_module: nn.Module, _args: Any, embedded_RLD: Tensor) -> Tensor:
        bound_RL = alpha / (lengths_RL * embedded_RLD.shape[-1]).sqrt()
        noise_RLD = torch.empty_like(embedded_RLD).uniform_(-1, 1)
        return embedded_RLD + noise_RLD * bound_RL[..., None].to(embedded_RLD.dtype)

    handle = unwrap(model.wrapped).get_input_embeddings().register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()
