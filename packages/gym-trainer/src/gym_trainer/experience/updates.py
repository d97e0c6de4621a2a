"""Applying operations to a library: sorted, deduplicated, without leaked answers, within the token budget."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gym_data.experience import Experience, ExperienceLibrary
from gym_sdk.spec.training_free import LibrarySpec
from gym_trainer.experience.lessons import Operation
from gym_trainer.experience.questions import Question

NEAR_DUPLICATE = 0.8
"""Shared words of two items over all their words (Jaccard), from which on they count as one lesson."""

_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an and any are as at be by do for from if in into is it its of on or so than that the then this to when "
        "whenever where with you your",
    )
)
_NEGATIONS = frozenset(("not", "never", "no", "without", "dont", "avoid"))


@dataclass(frozen=True, kw_only=True)
class Refused:
    """An operation that was not applied."""

    operation: Operation
    why: str


@dataclass(frozen=True, kw_only=True)
class Update:
    """A library after operations."""

    library: ExperienceLibrary
    applied: tuple[Operation, ...]
    refused: tuple[Refused, ...]
    evicted: tuple[str, ...]
    """Ids of items that left because the library had grown over its budget."""


def apply(
    library: ExperienceLibrary,
    operations: Iterable[Operation],
    *,
    limits: LibrarySpec,
    questions: Mapping[str, Question],
    usefulness: Mapping[str, int],
) -> Update:
    """Apply operations in sorted order: equal operations give an equal library, in whatever order they come.

    `questions` are the training questions by id, against which leaks are looked for; `usefulness` is an item's helpful
    minus its harmful count.
    """
    items: dict[str, Experience] = {item.id: item for item in library.items}
    applied: list[Operation] = []
    refused: list[Refused] = []
    for operation in sorted(operations, key=lambda each: each.sort_key):
        why = _refusal(operation, items, limits, questions)
        if why is not None:
            refused.append(Refused(operation=operation, why=why))
            continue
        applied.append(operation)
        match operation.op:
            case "add":
                items[operation.item().id] = operation.item()
            case "update":
                # The new wording takes the old one's place in the order.
                items = {
                    (operation.item().id if key == operation.target else key): (
                        operation.item() if key == operation.target else item
                    )
                    for key, item in items.items()
                }
            case "delete":
                del items[str(operation.target)]
            case "keep":
                pass
    kept, evicted = _within_budget(replace(library, items=tuple(items.values())), limits, usefulness)
    return Update(library=kept, applied=tuple(applied), refused=tuple(refused), evicted=evicted)


def _refusal(
    operation: Operation, items: Mapping[str, Experience], limits: LibrarySpec, questions: Mapping[str, Question]
) -> str | None:
    if operation.target is not None and operation.target not in items:
        return "the item was changed by another operation of the batch"
    if operation.op not in ("add", "update"):
        return None
    item = operation.item()
    if item.id in items:
        return "the library has this item already"
    if limits.drop_leaks:
        for source in operation.sources:
            question = questions.get(source)
            if question is not None and leaks(item.text, question):
                return f"it repeats the answer to question {source}"
    if limits.drop_duplicates:
        for other in items.values():
            if other.id != operation.target and says_the_same(item, other):
                return f"it says what item {other.id} says"
    return None


def _within_budget(
    library: ExperienceLibrary, limits: LibrarySpec, usefulness: Mapping[str, int]
) -> tuple[ExperienceLibrary, tuple[str, ...]]:
    evicted: list[str] = []
    while library.items and library.num_tokens_estimate > limits.max_tokens:
        # The least helpful leaves; of equals the newest, which has proved least.
        order = {item.id: position for position, item in enumerate(library.items)}
        worst = min(library.items, key=lambda item: (usefulness.get(item.id, 0), -order[item.id]))
        evicted.append(worst.id)
        library = library.without(worst.id)
    return library, tuple(evicted)


def says_the_same(one: Experience, other: Experience) -> bool:
    """Whether two items are one lesson in nearly the same words.

    Numbers, negations and capitalised names must agree: "add 5 for X" and "add 7 for X" contradict each other, and
    "for X" and "for Y" are two lessons, however many other words they share.
    """
    a, b = _words(one.text), _words(other.text)
    if _marks(one.text) != _marks(other.text):
        return False
    union = a | b
    return bool(union) and len(a & b) / len(union) >= NEAR_DUPLICATE


def leaks(text: str, question: Question) -> bool:
    """Whether a lesson gives away a training question's answer rather than how to find it.

    It does when it holds the whole answer, and with it at least two of the question's other numbers or a run of eight
    of its words; or when it holds an answer of 24 characters or more word for word.
    """
    if question.reference is None:
        return False
    answer = " ".join(question.reference.split()).casefold()
    lesson = " ".join(text.split()).casefold()
    if len(answer) >= 24 and answer in lesson:
        return True
    if not re.search(rf"(?<![\w.]){re.escape(answer)}(?!\w|\.\d)", lesson):
        return False
    # Counted as often as they occur: four crates at four marks are two numbers.
    shared = (_numbers(lesson) - _numbers(answer)) & _numbers(question.text)
    return shared.total() >= 2 or _shares_run(lesson, question.text.casefold(), length=8)


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.casefold().replace("'", ""))) - _STOP_WORDS


def _marks(text: str) -> tuple[frozenset[str], frozenset[str], bool]:
    # A capital at the start of a sentence says nothing; inside one it names something.
    names = frozenset(re.findall(r"(?<![.!?:]\s)(?<!^)\b[A-Z]\w+", text))
    return frozenset(_numbers(text)), names, bool(_words(text) & _NEGATIONS)


def _numbers(text: str) -> Counter[str]:
    """The numbers in a text, and how often each occurs."""
    return Counter(re.findall(r"\d+(?:\.\d+)?", text.replace(",", "")))


def _shares_run(one: str, other: str, length: int) -> bool:
    def runs(text: str) -> set[tuple[str, ...]]:
        words: Sequence[str] = re.findall(r"\w+", text)
        return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}

    return bool(runs(one) & runs(other))
