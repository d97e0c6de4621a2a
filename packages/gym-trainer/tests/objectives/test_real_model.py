"""Guards that each method does what it is for on a real model: SmolLM2-135M-Instruct, LoRA, text it has not seen.

Each test takes less than a minute on two cores. The same is asserted of tiny models with every run (test_held_out.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from known import GroupStore, build_preference, start_of
from moving import before_and_after
from test_held_out import FirstTokenRows

from gym_data import Document, Tokenizer
from gym_data.store import DocumentRole
from gym_sdk.spec import Cpo, Distillation, Dpo, Kto, Orpo, Reward, Simpo
from gym_sdk.spec.adapter import LoraAdapter
from gym_serve.models import load_model, resolve
from gym_trainer.adapters import attach
from gym_trainer.loop.batch import StoreRows
from gym_trainer.loop.forward import ForwardModel
from gym_trainer.objectives.base import Objective
from gym_trainer.objectives.classes import LABEL
from gym_trainer.objectives.distillation import DistillationObjective
from gym_trainer.objectives.reference import AdapterDisabled
from gym_trainer.objectives.scoring import ClassificationObjective, RewardObjective
from gym_trainer.objectives.sft import SftObjective

ANIMALS = ["lion", "zebra", "hippo", "kudu", "eland", "rhino", "hyena", "jackal", "baboon", "otter"]
PLACES = ["hill", "river", "gate", "camp", "ridge", "well", "bridge", "plain"]
NUM_STEPS, BATCH_SIZE, NUM_HELD_OUT = 8, 6, 12


class Rows:
    """Notes of what a ranger saw. A good answer is the species and the number; a bad one talks around it."""

    def __init__(self, folder: Path) -> None:
        tokenizer = Tokenizer.from_folder(folder)
        self.encode = tokenizer.encode
        self.end = tokenizer.eos_ids[0]

    def document(self, row: int, role: DocumentRole, *, good: bool = True) -> Document:
        animal, place, count = ANIMALS[row % 10], PLACES[row // 10 % 8], row % 7 + 2
        prompt = self.encode(f"Seen: {count} {animal} at the {place}. Record:")
        answer = self.encode(f" species={animal}; count={count}" if good else f" There were some at the {place}")
        ids = [*prompt, *answer, self.end]
        mask = [0] * len(prompt) + [1] * (len(answer) + 1)
        return Document(np.array(ids, np.uint32), np.array(mask, np.uint8), row, role)

    def store(self, kind: str, rows: range) -> Any:
        groups: list[tuple[Document, ...]] = []
        for row in rows:
            if kind == "pairs":
                chosen = self.document(row, DocumentRole.CHOSEN)
                groups.append((chosen, self.document(row, DocumentRole.REJECTED, good=False)))
            elif kind == "labels":
                good = row % 2 == 0
                role = DocumentRole.DESIRABLE if good else DocumentRole.UNDESIRABLE
                groups.append((self.document(row, role, good=good),))
            else:
                groups.append((self.document(row, DocumentRole.PLAIN),))
        return GroupStore(groups)


class RecordRows(FirstTokenRows):
    """The class of a row: whether it ends in a record."""

    def row(self, index: int) -> Any:
        row = StoreRows.row(self, index)
        is_record = row.documents[0].role is DocumentRole.DESIRABLE
        return type(row)(index=index, documents=row.documents, document_values={LABEL: (float(is_record),)})


class Classifier(ClassificationObjective):
    def __init__(self) -> None:
        self.scores = ("talk", "record")

    def rows(self, store: Any) -> StoreRows:
        return RecordRows(store)


def _distillation(folder: Path) -> Objective:
    """The teacher is the whole model, the student its first 24 layers."""
    objective = DistillationObjective(Distillation(teacher="./t"), teacher=None)  # type: ignore[arg-type]
    objective._teacher = ForwardModel(load_model(resolve(str(folder)), dtype="float32"))
    objective.start = lambda start, rows: list(rows)  # type: ignore[method-assign]
    return objective


def _preference(method: Any) -> Any:
    return lambda folder: build_preference(method, AdapterDisabled())


METHODS: dict[str, tuple[Any, str, str, float]] = {
    "sft": (lambda folder: SftObjective(), "chats", "token_accuracy", 0.2),
    "dpo": (_preference(Dpo(beta=0.1)), "pairs", "rewards/margins", 0.5),
    "orpo": (_preference(Orpo(odds_ratio_weight=1.0)), "pairs", "log_odds_chosen", 0.3),
    "simpo": (_preference(Simpo()), "pairs", "rewards/margins", 0.3),
    "cpo": (_preference(Cpo()), "pairs", "rewards/margins", 0.5),
    "kto": (_preference(Kto(beta=0.1)), "labels", "rewards/margins", 0.3),
    "reward": (lambda folder: RewardObjective(Reward(centering=0.01)), "pairs", "rewards/margins", 0.3),
    "classification": (lambda folder: Classifier(), "labels", "accuracy", 0.1),
    "distillation": (_distillation, "chats", "divergence", -0.2),
}
"""What is made, of which rows, what is measured, and how far it must move in which direction."""


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_method_moves_its_measure_on_a_real_model(name: str, smollm2_folder: Path, tmp_path: Path) -> None:
    make, kind, measure, least = METHODS[name]
    objective: Objective = make(smollm2_folder)
    torch.manual_seed(0)
    model: Any = load_model(resolve(str(smollm2_folder)), dtype="float32", scores=objective.scores)
    if name == "distillation":
        model.model.layers = model.model.layers[:24]
    trained = attach(model, LoraAdapter(rank=8), seed=0).model
    start = start_of(objective, trained, tmp_path, tokens=2000)
    texts = Rows(smollm2_folder)
    train, held_out = objective.start(
        start, [objective.rows(texts.store(kind, rows)) for rows in (range(64), range(64, 64 + NUM_HELD_OUT))]
    )
    before, after = before_and_after(
        objective,
        trained,
        start,
        train,
        held_out,
        measure,
        num_steps=NUM_STEPS,
        batch_size=BATCH_SIZE,
        num_held_out=NUM_HELD_OUT,
        learning_rate=2e-3,
    )
    change = after - before
    assert (change if least > 0 else -change) > abs(least), (before, after)
