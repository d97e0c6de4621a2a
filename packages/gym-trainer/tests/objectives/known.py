"""Models, pairs and labelled answers whose every number follows from a formula, the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gym_data import Document
from gym_data.store import DocumentRole
from gym_sdk.events import EventWriter
from gym_sdk.spec import Cpo, Dpo, Orpo, Simpo
from gym_trainer.fast.attention import PER_DOCUMENT, attention_of
from gym_trainer.loop.batch import Layout, StoreRows
from gym_trainer.loop.dataset import StepDataset
from gym_trainer.loop.forward import ForwardModel
from gym_trainer.loop.step import StepResult, StepRunner
from gym_trainer.objectives.base import Objective, Start
from gym_trainer.objectives.dpo import DpoObjective
from gym_trainer.objectives.kto import KtoObjective
from gym_trainer.objectives.reference import Reference
from gym_trainer.objectives.reference_free import CpoObjective, OrpoObjective, SimpoObjective

VOCABULARY_SIZE = 53
CPU = torch.device("cpu")


def noise(count: int, key: float) -> torch.Tensor:
    """Numbers between -1 and 1 without a pattern: float64 [count]."""
    places = torch.arange(count, dtype=torch.float64)
    return 2 * torch.frac(torch.sin(places * 12.9898 + key * 78.233) * 43758.5453).abs() - 1


def known_model(key: float, *, scale: float = 0.3) -> LlamaForCausalLM:
    """A float64 model of two layers."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config).double().eval()
    fill(model, key, scale)
    return model


def fill(model: torch.nn.Module, key: float, scale: float = 0.3) -> None:
    """Every trained weight from the formula; norms near 1."""
    for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        values = noise(parameter.numel(), key + number).view_as(parameter).to(parameter.dtype)
        parameter.data = 1 + 0.1 * values if parameter.ndim == 1 else scale * values


class GroupStore:
    """A token store in memory."""

    def __init__(self, groups: Sequence[tuple[Document, ...]]) -> None:
        self.groups = list(groups)
        self.documents = [document for group in self.groups for document in group]
        self.lengths = np.array([len(document.ids) for document in self.documents])
        self.group_lengths = np.array([sum(len(d.ids) for d in group) for group in self.groups])

    def __len__(self) -> int:
        return len(self.documents)

    def group(self, index: int) -> tuple[Document, ...]:
        return self.groups[index]


def document(length: int, prompt: int, key: float, role: DocumentRole, row: int = 1) -> Document:
    """Ids by the formula; the first `prompt` of them depend on the row alone."""
    ids = ((noise(length, key) + 1) / 2 * VOCABULARY_SIZE).long()
    ids[:prompt] = ((noise(prompt, 1000.0 + row) + 1) / 2 * VOCABULARY_SIZE).long()
    mask = np.ones(length, np.uint8)
    mask[:prompt] = 0
    return Document(ids.clamp(max=VOCABULARY_SIZE - 1).numpy().astype(np.uint32), mask, row, role)


def pair_store(num_pairs: int = 6) -> GroupStore:
    """Pairs whose answers have 2 to 17 tokens, the chosen one now longer, now shorter."""
    groups = []
    for row in range(num_pairs):
        prompt = 3 + row % 4
        chosen, rejected = 2 + (7 * row) % 13, 2 + (5 * row + 9) % 16
        groups.append(
            (
                document(prompt + chosen, prompt, 20.0 + row, DocumentRole.CHOSEN, row),
                document(prompt + rejected, prompt, 50.0 + row, DocumentRole.REJECTED, row),
            )
        )
    return GroupStore(groups)


def label_store(num_rows: int = 7) -> GroupStore:
    """Good and bad answers, each to a prompt of its own."""
    groups = []
    for row in range(num_rows):
        prompt = 3 + row % 4
        role = DocumentRole.DESIRABLE if row % 3 else DocumentRole.UNDESIRABLE
        groups.append((document(prompt + 2 + (7 * row) % 13, prompt, 80.0 + row, role, row),))
    return GroupStore(groups)


def logprobs_of(model: torch.nn.Module, document: Document) -> torch.Tensor:
    """Each answer token's log-probability, float64, by one plain forward of this document alone."""
    ids = torch.tensor(document.ids.astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0].double()
    table = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    trained = torch.tensor(document.loss_mask[1:] != 0)
    return table[:-1].gather(1, ids[1:, None])[:, 0][trained]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def measure(
    objective: Objective,
    model: torch.nn.Module,
    rows: StoreRows,
    *,
    tokens: int = 10_000,
    layout: Layout = "packed",
) -> StepResult:
    """One step over all rows, its gradients left in the model."""
    model.zero_grad()
    step = StepDataset(rows, batch_size=len(rows), seed=0)[0]
    runner = StepRunner(objective, micro_batch_tokens=tokens, layout=layout, device=CPU)
    with _attention_for(layout, model):
        return runner.run(ForwardModel(model), step, backward=lambda loss: loss.backward())


def _attention_for(layout: Layout, model: Any) -> AbstractContextManager[Any]:
    """A pair's common prompt needs an attention that knows of it."""
    return attention_of(model, PER_DOCUMENT) if layout == "shared" else nullcontext()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x), written out."""
    return 1 / (1 + torch.exp(-x))


def fingerprint(model: torch.nn.Module) -> list[float]:
    """The gradient's norm, and its product with the formula's numbers: two numbers that pin every entry down."""
    flat = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
    return [float(flat.norm()), float(flat @ noise(len(flat), 7.0)) / math.sqrt(len(flat))]


class OtherModel(Reference):
    """A reference that is simply another model, so that a test knows what it says."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def logprobs(self, model: Any, batch: Any, logprobs: Any) -> torch.Tensor:
        with torch.no_grad(), _attention_for(batch.layout, self.model):
            return logprobs(ForwardModel(self.model), batch)


def build_preference(method: Any, reference: Reference) -> Objective:
    """The objective of a preference method, with this reference."""
    match method:
        case Dpo():
            return DpoObjective(method, reference)
        case Orpo():
            return OrpoObjective(method)
        case Simpo():
            return SimpoObjective(method)
        case Cpo():
            return CpoObjective(method)
        case _:
            return KtoObjective(method, reference, seed=0)


def start_of(objective: Objective, model: Any, run_path: Any, *, tokens: int = 60) -> Start:
    """What a method gets before the first step."""
    return Start(
        model=ForwardModel(model),
        runner=StepRunner(objective, micro_batch_tokens=tokens, layout="packed", device=CPU),
        settings=None,  # type: ignore[arg-type]
        run_path=run_path,
        events=EventWriter(run_path / f"events-{id(model)}.jsonl"),
        stack=ExitStack(),
    )
