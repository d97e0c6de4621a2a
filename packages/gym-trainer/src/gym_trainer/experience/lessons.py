"""Operations on the library, and how they are read from a teacher's answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gym_data.experience import Experience, ExperienceLibrary

OpName = Literal["add", "update", "delete", "keep"]
OPS: tuple[OpName, ...] = ("delete", "update", "add", "keep")
"""In the order in which they are applied."""


class Malformed(Exception):
    """A teacher's answer that cannot be read, and why."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One change of the library. `target` is the content id of an item; `sources` are ids of questions."""

    op: OpName
    target: str | None = None
    name: str = ""
    text: str = ""
    sources: tuple[str, ...] = ()

    @property
    def sort_key(self) -> tuple[int, int, str, str, str]:
        """The order of application: by kind, then by support, then by content. Never by time of arrival."""
        return OPS.index(self.op), -len(self.sources), self.target or "", self.name, self.text

    def item(self) -> Experience:
        return Experience(name=self.name, text=self.text)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"op": self.op}
        if self.target is not None:
            data["target"] = self.target
        if self.op in ("add", "update"):
            data.update(name=self.name, text=self.text)
        return {**data, "sources": list(self.sources)}

    def shown(self, library: ExperienceLibrary) -> dict[str, str]:
        """As a proposal in a prompt, with the item's number in `library`."""
        data: dict[str, str] = {"op": self.op}
        if self.target is not None:
            ids = [item.id for item in library.items]
            data["id"] = str(ids.index(self.target) + 1)
        if self.op in ("add", "update"):
            data.update(name=self.name, text=self.text)
        return data


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a teacher's answer says."""

    operations: tuple[Operation, ...]
    origins: tuple[tuple[int, ...], ...]
    """For each operation the numbers of the proposals that it names."""

    problems: tuple[str, ...]
    """Why each operation that was left out cannot be used."""


def read_operations(
    text: str, library: ExperienceLibrary, *, max_words: int, max_operations: int | None = None
) -> Reading:
    """The operations in a teacher's answer. Raises Malformed when there is no list of them.

    Strict about meaning: an unknown number, an update without a text or an item over its length is a problem, never
    guessed at (an update of an unknown item is not an addition, a deletion without a number deletes nothing).
    """
    operations: list[Operation] = []
    origins: list[tuple[int, ...]] = []
    problems: list[str] = []
    changes = 0
    for number, entry in enumerate(_operations_list(text), 1):
        try:
            operation = _operation(entry, number, library, max_words)
        except Malformed as problem:
            problems.append(str(problem))
            continue
        changes += operation.op != "keep"
        if max_operations is not None and operation.op != "keep" and changes > max_operations:
            problems.append(f"operation {number} is one too many; at most {max_operations} are allowed.")
            continue
        operations.append(operation)
        found = entry.get("from")
        numbers = found if isinstance(found, list) else [found]
        origins.append(tuple(int(n) for n in numbers if isinstance(n, int | str) and str(n).isdigit()))
    return Reading(operations=tuple(operations), origins=tuple(origins), problems=tuple(problems))


def read_used(summary: str, library: ExperienceLibrary) -> list[str]:
    """The content ids of the experiences that a summary says an attempt followed."""
    lines = re.findall(r"^\W*used\W*:\s*(.*)$", summary, re.IGNORECASE | re.MULTILINE)
    numbers = {int(n) for n in re.findall(r"\d+", lines[-1])} if lines else set[int]()
    return [item.id for number, item in enumerate(library.items, 1) if number in numbers]


def with_sources(operation: Operation, sources: Sequence[str]) -> Operation:
    return replace(operation, sources=tuple(sorted(set(sources))))


def _operations_list(text: str) -> list[dict[str, Any]]:
    """The `operations` of the last JSON object that has them, bare or in a code fence."""
    decoder = json.JSONDecoder(strict=False)
    found: Any = None
    position = text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
        except (json.JSONDecodeError, RecursionError):
            end = position + 1
        else:
            if isinstance(value, dict) and "operations" in value:
                found = value["operations"]
        position = text.find("{", end)
    if found is None:
        raise Malformed('it holds no JSON object with the key "operations".')
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise Malformed('"operations" must be a list of objects.')
    return found


def _operation(entry: dict[str, Any], number: int, library: ExperienceLibrary, max_words: int) -> Operation:
    op = entry.get("op")
    if op not in OPS:
        raise Malformed(f"operation {number} has the op {op!r}; it must be add, update, delete or keep.")
    target = None
    if op != "add":
        raw = str(entry.get("id", "")).strip("[] ")
        if not raw.isdigit() or not 1 <= int(raw) <= len(library.items):
            raise Malformed(f"operation {number} ({op}) names the experience {raw!r}, which does not exist.")
        target = library.items[int(raw) - 1].id
    if op in ("delete", "keep"):
        return Operation(op=op, target=target)
    name, text = (" ".join(str(entry.get(key) or "").split()) for key in ("name", "text"))
    if not text:
        raise Malformed(f"operation {number} ({op}) has no text.")
    if len(text.split()) > max_words:
        raise Malformed(
            f"the text of operation {number} has {len(text.split())} words; at most {max_words} are allowed."
        )
    return Operation(op=op, target=target, name=" ".join(name.split()[:12]) or "Experience", text=text)
