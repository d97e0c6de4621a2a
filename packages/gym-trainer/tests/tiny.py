"""Tiny models and hand-made rows for the trainer's tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

VOCABULARY_SIZE = 61


@dataclass
class TinyDocument:
    tokens: np.ndarray
    loss_mask: np.ndarray


class TinyStore:
    """A token store in memory."""

    def __init__(self, documents: list[TinyDocument]) -> None:
        self.documents = documents
        self.offsets = np.concatenate([[0], np.cumsum([len(d.tokens) for d in documents])]).astype(np.int64)

    def __getitem__(self, index: int) -> TinyDocument:
        return self.documents[index]

    def __len__(self) -> int:
        return len(self.documents)


def tiny_model(*, seed: int = 0, dtype: torch.dtype = torch.float32, **config: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    values: dict[str, object] = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }
    model = AutoModelForCausalLM.from_config(LlamaConfig(**(values | config)))
    return model.to(dtype).eval()


def tiny_store(num_rows: int = 64, *, seed: int = 0, min_length: int = 3, max_length: int = 60) -> TinyStore:
    """Rows of very different length; the first third of each, at least one token, is prompt."""
    random = np.random.default_rng(seed)
    documents = []
    for _ in range(num_rows):
        length = int(random.integers(min_length, max_length + 1))
        mask = np.ones(length, dtype=np.uint8)
        mask[: max(1, length // 3)] = 0
        documents.append(TinyDocument(random.integers(0, VOCABULARY_SIZE, length).astype(np.uint32), mask))
    return TinyStore(documents)
