"""The hidden rules and the questions of one world."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from simworld.language import SKINS, Effect, Question, Skin, find_questions

_ONSETS = re.findall(r"\w+", "b br d dr f g gl h j k kl l m n p pr qu r s sk st t tr v w z")
_VOWELS = re.findall(r"\w+", "a e i o u ae ia oo")
_CODAS = re.findall(r"\w+", "l m n r sk st th x nd rk")


@dataclass(frozen=True)
class Task:
    """A question, its answer, and the words whose rules it needs."""

    question: str
    answer: int
    needs: tuple[str, ...]


@dataclass(frozen=True)
class World:
    """Everything that a seed fixes. `rules` maps a word to its effect; a word without a rule changes nothing."""

    seed: int
    skin: Skin
    vocabulary: tuple[tuple[str, ...], ...]
    """The words that may stand in each clause."""

    rules: dict[str, Effect]

    @property
    def lexicon(self) -> frozenset[str]:
        return frozenset(word for words in self.vocabulary for word in words)

    @classmethod
    def make(cls, seed: int, num_rules: int = 12, words_per_clause: int = 5) -> World:
        rng = random.Random(f"world/{seed}")
        skin = SKINS[rng.randrange(len(SKINS))]
        taken: set[str] = set()
        vocabulary: list[tuple[str, ...]] = []
        for _ in skin.clauses:
            words: list[str] = []
            while len(words) < words_per_clause:
                word = "".join(rng.choice(part) for part in (_ONSETS, _VOWELS, _ONSETS, _VOWELS, _CODAS)).capitalize()
                if word not in taken:
                    taken.add(word)
                    words.append(word)
            vocabulary.append(tuple(words))
        # Every clause keeps a word without a rule, so that a task can need as few rules as it likes.
        open_words = [word for words in vocabulary for word in words[1:]]
        ruled = sorted(rng.sample(open_words, num_rules))
        return cls(seed, skin, tuple(vocabulary), {word: _draw_effect(rng) for word in ruled})

    def tasks(self, split: str, count: int) -> list[Task]:
        """Tasks that need one, two or three rules in equal shares; splits differ, and no question repeats."""
        rng = random.Random(f"tasks/{self.seed}/{split}")
        made: dict[str, Task] = {}
        while len(made) < count:
            task = self._task(rng, 1 + len(made) % 3)
            made.setdefault(task.question, task)
        return list(made.values())

    def _task(self, rng: random.Random, num_needed: int) -> Task:
        with_rules = [i for i, words in enumerate(self.vocabulary) if any(word in self.rules for word in words)]
        needed = set(rng.sample(with_rules, min(num_needed, len(with_rules))))
        order = list(range(len(self.vocabulary)))
        rng.shuffle(order)
        clauses: list[str] = []
        for index in order:
            words = [word for word in self.vocabulary[index] if (word in self.rules) == (index in needed)]
            fields = {"w": rng.choice(words), "q": rng.randint(3, 20), "p": rng.randint(2, 9)}
            clauses.append(self.skin.clauses[index].format(**fields))
        text = f"{self.skin.opening} {', '.join(clauses)}. {self.skin.closing}"
        question = find_questions(text)[0][1]
        return Task(text, self.solve(question), tuple(word for word in question.words if word in self.rules))

    def solve(self, question: Question) -> int:
        """Apply the rules in the order in which the question mentions their words."""
        amount = question.start
        for word in question.words:
            amount = self.rules.get(word, Effect("none")).apply(amount, question.quantity)
        return amount

    def oracle(self) -> list[tuple[str, str]]:
        """The hidden rules in plain words: the ceiling of what a library can say."""
        return [(f"About {word}", f"When {word} is mentioned, {plain(effect)}.") for word, effect in self.rules.items()]


def _draw_effect(rng: random.Random) -> Effect:
    op = rng.choice(("add", "add", "subtract", "multiply", "per_unit"))
    low, high = {"add": (3, 15), "subtract": (2, 5), "multiply": (2, 3), "per_unit": (1, 3)}[op]
    return Effect(op, rng.randint(low, high))


def plain(effect: Effect, container: str = "item") -> str:
    """An effect in plain words."""
    return {
        "add": f"add {effect.number}",
        "subtract": f"subtract {effect.number}",
        "multiply": f"multiply by {effect.number}",
        "per_unit": f"add {effect.number} for each {container}",
        "divide": f"divide by {effect.number}",
        "none": "leave the amount unchanged",
    }[effect.op]
