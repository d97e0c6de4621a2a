"""What the benchmarks here share: Qwen3 architectures, random weights and rows, and a fit as `gym train` does it."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from gym_data import Document
from gym_data.store import DocumentRole
from gym_sdk.events import EventWriter, LogEvent, MetricEvent, read_events
from gym_sdk.spec import RunSpec, spec_from_data
from gym_trainer.loop.batch import StoreRows
from gym_trainer.loop.fit import FitSettings, fit
from gym_trainer.objectives.base import Objective
from gym_trainer.planning import Plan

VOCABULARY_SIZE = 151_936
_SIZES = {
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "8B": (4096, 12288, 36, 32, False),
    "32B": (5120, 25600, 64, 64, False),
}


def qwen3(size: str) -> Qwen3Config:
    hidden, intermediate, num_layers, num_heads, tied = _SIZES[size]
    return Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-6,
        pad_token_id=0,
    )


def random_model(size: str) -> Any:
    """In bfloat16 on the CUDA device."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(qwen3(size), dtype=torch.bfloat16)


def run_spec(**sections: Any) -> RunSpec:
    """A run whose model and data are made here; LoRA of rank 16 on every linear layer."""
    train = {"learning_rate": 1e-4, "schedule": "constant", "warmup_ratio": 0.0, "checkpoint_every_steps": 1000}
    values = {"model": {"source": "random"}, "data": {"train": [{"source": "random"}]}}
    return spec_from_data(values | sections | {"train": train | sections.get("train", {})})


class Groups:
    """A token store in memory."""

    def __init__(self, groups: Sequence[tuple[Document, ...]]) -> None:
        self.groups = list(groups)
        self.documents = [document for group in self.groups for document in group]
        self.lengths = np.array([len(document.ids) for document in self.documents])
        self.group_lengths = np.array([sum(len(document.ids) for document in group) for group in self.groups])

    def __len__(self) -> int:
        return len(self.documents)

    def group(self, index: int) -> tuple[Document, ...]:
        return self.groups[index]


def plain_rows(lengths: Sequence[int]) -> StoreRows:
    """Random documents, every token trained."""
    random = np.random.default_rng(0)
    documents = []
    for number, length in enumerate(lengths):
        ids = random.integers(0, VOCABULARY_SIZE, length).astype(np.uint32)
        documents.append((Document(ids, np.ones(length, np.uint8), number),))
    return StoreRows(Groups(documents))  # type: ignore[arg-type]


def pairs(lengths: Sequence[tuple[int, int]]) -> list[tuple[Document, Document]]:
    """Random pairs from the lengths of prompts and answers: the rejected answer is as long as the next row's."""
    random = np.random.default_rng(0)
    made = []
    for number, (prompt_length, answer_length) in enumerate(lengths):
        prompt = random.integers(0, VOCABULARY_SIZE, prompt_length)
        documents = []
        for role, length in (
            (DocumentRole.CHOSEN, answer_length),
            (DocumentRole.REJECTED, lengths[(number + 1) % len(lengths)][1]),
        ):
            ids = np.concatenate([prompt, random.integers(0, VOCABULARY_SIZE, length)]).astype(np.uint32)
            mask = np.repeat([0, 1], [prompt_length, length]).astype(np.uint8)
            documents.append(Document(ids, mask, number, role))
        made.append((documents[0], documents[1]))
    return made


def fit_steps(
    model: Any, spec: RunSpec, plan: Plan, objective: Objective, rows: StoreRows, *, num_warm: int
) -> dict[str, Any]:
    """Train `spec.train.max_steps` steps as the plan says; the mean of those after the first `num_warm`.

    `step_s` is the whole step with the optimizer's part, as `gym train` reports it.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    folder = Path(tempfile.mkdtemp(prefix="gym-bench-"))
    (folder / "checkpoints").mkdir()
    try:
        with EventWriter(folder / "events.jsonl") as events:
            result = fit(
                model,
                spec,
                FitSettings.of(plan),
                objective,
                train_rows=rows,
                eval_rows=None,
                run_path=folder,
                events=events,
            )
        told = list(read_events(folder / "events.jsonl"))
    finally:
        shutil.rmtree(folder)
    steps = [e.values for e in told if isinstance(e, MetricEvent) and "throughput_tokens_per_s" in e.values]
    seconds = [values["num_tokens"] / values["throughput_tokens_per_s"] for values in steps]
    measured = seconds[num_warm:]
    num_tokens = sum(values["num_tokens"] for values in steps[num_warm:])
    return {
        "tokens_per_s": num_tokens / sum(measured),
        "step_s": sum(measured) / len(measured),
        "all_steps_s": seconds,
        "losses": [values["loss"] for values in steps],
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "micro_batch_tokens": result.micro_batch_tokens,
        "warnings": [e.text for e in told if isinstance(e, LogEvent) and e.level == "warning"],
    }
