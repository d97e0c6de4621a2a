"""Where each experience comes from, how it fared, and every decision of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gym_data.experience import ExperienceLibrary
from gym_trainer.experience.lessons import Operation
from gym_trainer.experience.rollouts import Group


@dataclass
class ItemRecord:
    """The history of one content id."""

    first_step: int | None
    """The step that proposed it; None for an item of the initial library."""

    operations: list[dict[str, Any]] = field(default_factory=list)
    helpful: int = 0
    """Right attempts in its trial, or that a summary says followed it, and proposals to keep it."""

    harmful: int = 0
    """Wrong attempts in its trial, or that a summary says followed it, and proposals to delete it."""


@dataclass
class Provenance:
    """By content id, for every item that ever stood in a candidate library."""

    items: dict[str, ItemRecord] = field(default_factory=dict)

    def begin(self, library: ExperienceLibrary) -> None:
        for item in library.items:
            self.items.setdefault(item.id, ItemRecord(first_step=None))

    def record(self, step: int, operations: Iterable[Operation], groups: Iterable[Group]) -> None:
        """Note operations, with the rollouts of the questions that they rest on."""
        rollouts = {group.question.id: [rollout.key for rollout in group.rollouts] for group in groups}
        for operation in operations:
            content_id = operation.item().id if operation.op in ("add", "update") else str(operation.target)
            record = self.items.setdefault(content_id, ItemRecord(first_step=step))
            evidence = {source: rollouts[source] for source in operation.sources if source in rollouts}
            entry: dict[str, Any] = {"step": step, "op": operation.op, "questions": evidence}
            if operation.op == "update":
                entry["replaces"] = operation.target
            record.operations.append(entry)

    def count(self, item_id: str, *, helped: bool) -> None:
        record = self.items.setdefault(item_id, ItemRecord(first_step=None))
        if helped:
            record.helpful += 1
        else:
            record.harmful += 1

    def usefulness(self) -> dict[str, int]:
        return {item_id: record.helpful - record.harmful for item_id, record in self.items.items()}

    def to_json(self, library: ExperienceLibrary, worth: dict[str, Any]) -> dict[str, Any]:
        """Of the items of a library, in its order."""
        found: dict[str, Any] = {}
        for item in library.items:
            record = self.items.get(item.id, ItemRecord(first_step=None))
            found[item.id] = {
                "name": item.name,
                "first_step": record.first_step,
                "helpful": record.helpful,
                "harmful": record.harmful,
                "worth": worth.get(item.id),
                "operations": record.operations,
            }
        return found
