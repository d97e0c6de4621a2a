"""A student that executes what its prompt states, and slips in typical ways where it states nothing."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from typing import Any

from simworld.language import Effect, Memory, Statement, find_questions, read_statements
from simworld.tasks import World, plain


@dataclass(frozen=True)
class Habits:
    """How the student behaves; shares of 1."""

    knows: float = 0.5
    """How often it hits an unstated rule by itself: without it no group would ever hold a right attempt."""

    misremembers: float = 0.25
    """How often it applies a wrong effect for an unstated rule; otherwise it forgets the rule."""

    invents: float = 0.04
    """How often it applies an effect for a word that has no rule."""

    follows: float = 0.97
    """How often it follows a stated rule while the guidance is short."""

    dilution: float = 0.004
    """How much `follows` falls for each sentence of guidance beyond the first twelve."""

    hides: float = 0.35
    """How often a step of the working does not name its reason."""


def reply(world: World, messages: list[dict[str, Any]], seed: int, habits: Habits = Habits()) -> str:
    """Answer the last question in `messages`. Equal messages and seed give an equal answer."""
    text = "\n".join(str(message["content"]) for message in messages)
    questions = find_questions(text)
    if not questions:
        return "I do not see a question."
    begin, question = questions[-1]
    guidance = text[:begin] + "\n" + text[begin + len(question.text) :]
    statements = read_statements(guidance, world.lexicon)
    rng = random.Random(hashlib.sha256(json.dumps([world.seed, text, seed]).encode()).digest())
    follows = max(0.5, habits.follows - habits.dilution * max(0, _num_sentences(guidance) - 12))

    lines = [f"Start: {question.quantity} x {question.price} = {question.start}."]
    amount = question.start

    def step(label: str, effect: Effect) -> None:
        nonlocal amount
        if effect.op == "none":
            return
        amount = effect.apply(amount, question.quantity)
        hidden = rng.random() < habits.hides
        how = f"{label}: {plain(effect, question.skin.container)}, making"
        lines.append(f"{'Then' if hidden else how} {amount}.")

    remembered = [
        memory.total
        for memory in statements
        if isinstance(memory, Memory)
        and memory.word in question.words
        and (memory.quantity, memory.price) == (question.quantity, question.price)
    ]
    if remembered and rng.random() < follows:
        lines += [f"Then {remembered[0]}.", f"Answer: {remembered[0]}"]
        return "\n".join(lines)

    rules = [statement for statement in statements if isinstance(statement, Statement)]
    for word in question.words:
        stated = sorted(
            {rule.effect for rule in rules if rule.words[:1] == (word,) and set(rule.words) <= set(question.words)}
        )
        if stated and rng.random() < follows:
            step(word, rng.choice(stated))
        else:
            step(word, _unstated(world, word, habits, rng))
    for effect in sorted({rule.effect for rule in rules if not rule.words}):
        if rng.random() < follows:
            step("Finally", effect)
    lines.append(f"Answer: {amount}")
    return "\n".join(lines)


def _unstated(world: World, word: str, habits: Habits, rng: random.Random) -> Effect:
    true = world.rules.get(word)
    draw = rng.random()
    if true is None:
        return _slip(rng) if draw < habits.invents else Effect("none")
    if draw < habits.knows:
        return true
    if draw < habits.knows + habits.misremembers:
        wrong = _slip(rng)
        return wrong if wrong != true else Effect("none")
    return Effect("none")


def _slip(rng: random.Random) -> Effect:
    op = rng.choice(("add", "subtract", "multiply", "per_unit"))
    return Effect(op, rng.randint(2, 3) if op in ("multiply", "per_unit") else rng.randint(2, 12))


def _num_sentences(text: str) -> int:
    return sum(1 for line in text.replace(". ", ".\n").splitlines() if len(line.split()) >= 3)
