"""Tiny models and hand-made rows for the trainer's tests."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from gym_data import Document

VOCABULARY_SIZE = 61


class TinyStore:
    """A token store in memory, every document a group of its own."""

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        self.lengths = self.group_lengths = np.array([len(document.ids) for document in documents])

    def __len__(self) -> int:
        return len(self.documents)

    def group(self, index: int) -> tuple[Document, ...]:
        return (self.documents[index],)


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
    for number in range(num_rows):
        length = int(random.integers(min_length, max_length + 1))
        mask = np.ones(length, dtype=np.uint8)
        mask[: max(1, length // 3)] = 0
        documents.append(Document(random.integers(0, VOCABULARY_SIZE, length).astype(np.uint32), mask, row=number + 1))
    return TinyStore(documents)
