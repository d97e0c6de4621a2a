"""Guards that each method does what it is for: its own measure moves the right way on rows it was not trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from known import GroupStore, build_preference, start_of
from moving import before_and_after
from tiny_rows import VOCABULARY_SIZE, tiny_model
from transformers import LlamaForSequenceClassification

from gym_data import Document
from gym_data.store import DocumentRole
from gym_sdk.spec import Cpo, Distillation, Dpo, Kto, Orpo, Reward, Simpo, WeightedLoss
from gym_trainer.loop.batch import Row, StoreRows
from gym_trainer.loop.forward import ForwardModel
from gym_trainer.objectives.base import Objective
from gym_trainer.objectives.classes import LABEL
from gym_trainer.objectives.distillation import DistillationObjective
from gym_trainer.objectives.reference import FrozenCopy
from gym_trainer.objectives.scoring import ClassificationObjective, RewardObjective
from gym_trainer.objectives.sft import SftObjective

NUM_STEPS, BATCH_SIZE = 30, 16


def answer(random: np.random.Generator, row: int, role: DocumentRole, *, good: bool) -> Document:
    """A prompt of four tokens; a good answer counts up from 5, a bad one from 40."""
    prompt = np.random.default_rng((7, row)).integers(2, VOCABULARY_SIZE, 4)
    length = int(random.integers(2, 7))
    first = 5 if good else 40
    ids = np.concatenate([prompt, np.arange(first, first + length)]).astype(np.uint32)
    mask = np.concatenate([np.zeros(4, np.uint8), np.ones(length, np.uint8)])
    return Document(ids, mask, row, role)


def store(kind: str, rows: range) -> GroupStore:
    random = np.random.default_rng((1, rows.start))
    groups: list[tuple[Document, ...]] = []
    for row in rows:
        if kind == "pairs":
            groups.append(
                (
                    answer(random, row, DocumentRole.CHOSEN, good=True),
                    answer(random, row, DocumentRole.REJECTED, good=False),
                )
            )
        elif kind == "labels":
            good = row % 2 == 0
            role = DocumentRole.DESIRABLE if good else DocumentRole.UNDESIRABLE
            groups.append((answer(random, row, role, good=good),))
        else:
            groups.append((answer(random, row, DocumentRole.PLAIN, good=True),))
    return GroupStore(groups)


class FirstTokenRows(StoreRows):
    """The class of a row: whether its first token is even."""

    def row(self, index: int) -> Row:
        row = super().row(index)
        label = float(int(row.documents[0].ids[0]) % 2)
        return Row(index=index, documents=row.documents, document_values={LABEL: (label,)})


class Classifier(ClassificationObjective):
    def __init__(self) -> None:
        self.scores = ("odd", "even")

    def rows(self, store: Any) -> StoreRows:
        return FirstTokenRows(store)


def scorer(num_labels: int) -> torch.nn.Module:
    config = tiny_model().config
    config.num_labels, config.pad_token_id = num_labels, 0
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config).eval()


def distillation(kind: str) -> Callable[[], Objective]:
    def make() -> Objective:
        objective = DistillationObjective(Distillation(teacher="./t", divergence=kind), teacher=None)  # type: ignore[arg-type]
        objective._teacher = ForwardModel(tiny_model(seed=5))
        objective.start = lambda start, rows: list(rows)  # type: ignore[method-assign]
        return objective

    return make


def preference(method: Any) -> Callable[[], Objective]:
    return lambda: build_preference(method, FrozenCopy())


METHODS: dict[str, tuple[Callable[[], Objective], str, str, str]] = {
    "sft": (SftObjective, "chats", "token_accuracy", "up"),
    "sft, dft": (lambda: SftObjective(loss_kind="dft"), "chats", "nll", "down"),
    "sft, neftune": (lambda: SftObjective(neftune_alpha=5.0), "chats", "token_accuracy", "up"),
    "dpo": (preference(Dpo(beta=0.3)), "pairs", "rewards/margins", "up"),
    "dpo, ipo": (preference(Dpo(loss="ipo")), "pairs", "rewards/margins", "up"),
    "dpo, hinge": (preference(Dpo(loss="hinge")), "pairs", "rewards/margins", "up"),
    "dpo, robust": (preference(Dpo(loss="robust", label_smoothing=0.1)), "pairs", "rewards/margins", "up"),
    "dpo, apo_zero": (preference(Dpo(loss="apo_zero")), "pairs", "rewards/margins", "up"),
    "dpo, apo_down": (preference(Dpo(loss="apo_down")), "pairs", "rewards/margins", "up"),
    "dpo, apo_down, chosen": (preference(Dpo(loss="apo_down")), "pairs", "rewards/chosen", "down"),
    "dpo, length": (preference(Dpo(length_alpha=0.3)), "pairs", "rewards/margins", "up"),
    "dpo with sft": (
        preference(Dpo(extra_losses=[WeightedLoss(name="sft", weight=1.0)])),
        "pairs",
        "logps/chosen",
        "up",
    ),
    "orpo": (preference(Orpo()), "pairs", "logps/chosen", "up"),
    "orpo, odds": (preference(Orpo(odds_ratio_weight=1.0)), "pairs", "log_odds_chosen", "up"),
    "simpo": (preference(Simpo()), "pairs", "rewards/accuracies", "up"),
    "cpo": (preference(Cpo()), "pairs", "rewards/margins", "up"),
    "kto": (preference(Kto(beta=0.3)), "labels", "rewards/margins", "up"),
    "reward": (lambda: RewardObjective(Reward(centering=0.01)), "pairs", "rewards/accuracies", "up"),
    "classification": (Classifier, "chats", "accuracy", "up"),
    "distillation, forward_kl": (distillation("forward_kl"), "chats", "divergence", "down"),
    "distillation, reverse_kl": (distillation("reverse_kl"), "chats", "divergence", "down"),
    "distillation, jsd": (distillation("jsd"), "chats", "divergence", "down"),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_moves_its_measure_on_rows_it_has_not_seen(name: str, tmp_path: Any) -> None:
    make, kind, measure, direction = METHODS[name]
    objective = make()
    model = scorer(len(objective.scores)) if objective.scores else tiny_model(seed=3)
    start = start_of(objective, model, tmp_path, tokens=2000)
    rows = [objective.rows(store(kind, rows)) for rows in (range(320), range(1000, 1064))]  # type: ignore[arg-type]
    train, held_out = objective.start(start, rows)
    before, after = before_and_after(
        objective,
        model,
        start,
        train,
        held_out,
        measure,
        num_steps=NUM_STEPS,
        batch_size=BATCH_SIZE,
        num_held_out=64,
        learning_rate=3e-3,
    )
    change = after - before
    assert (change if direction == "up" else -change) > LEAST.get(measure, 0.05), (before, after)


LEAST = {"token_accuracy": 0.2, "rewards/accuracies": 0.2, "accuracy": 0.15, "logps/chosen": 1.0, "nll": 0.5}
"""How far a measure must move."""
