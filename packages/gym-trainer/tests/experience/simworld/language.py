"""The English that student and teacher read: questions, statements of rules, and worked answers."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

Op = Literal["add", "subtract", "multiply", "per_unit", "divide", "none"]


@dataclass(frozen=True, order=True)
class Effect:
    """What a rule does to the running amount."""

    op: Op
    number: int = 0

    def apply(self, amount: int, quantity: int) -> int:
        match self.op:
            case "add":
                return amount + self.number
            case "subtract":
                return amount - self.number
            case "multiply":
                return amount * self.number
            case "per_unit":
                return amount + self.number * quantity
            case "divide":
                return amount // self.number
            case "none":
                return amount


@dataclass(frozen=True)
class Skin:
    """A trade with its own nouns. `clauses` place five made-up words around quantity and price."""

    opening: str
    clauses: tuple[str, ...]
    closing: str
    container: str
    unit: str
    total: str


SKINS = (
    Skin(
        "A barge arrives",
        (
            "from {w} harbour",
            "with {q} crates of {w} at {p} marks a crate",
            "on a {w} morning",
            "under the {w} flag",
            "to lie at {w} pier",
        ),
        "What is the fee in marks?",
        "crate",
        "mark",
        "fee",
    ),
    Skin(
        "A caravan sets out",
        (
            "led by a {w} guide",
            "with {q} sacks of {w} at {p} coins a sack",
            "over the {w} pass",
            "in the {w} season",
            "bound for {w} market",
        ),
        "What is the toll in coins?",
        "sack",
        "coin",
        "toll",
    ),
    Skin(
        "A workshop takes an order",
        (
            "signed by the {w} guild",
            "with {q} lamps of {w} at {p} pearls a lamp",
            "fired in the {w} kiln",
            "sealed with {w} wax",
            "sent by {w} courier",
        ),
        "What is the price in pearls?",
        "lamp",
        "pearl",
        "price",
    ),
)

_WORD = r"(?P<w>[A-Z][a-z]+)"


@dataclass(frozen=True)
class Question:
    """A question as read from text: its made-up words in the order in which they are mentioned."""

    text: str
    skin: Skin
    quantity: int
    price: int
    words: tuple[str, ...]

    @property
    def start(self) -> int:
        return self.quantity * self.price


def find_questions(text: str) -> list[tuple[int, Question]]:
    """Every question in a text, with the offset at which it begins."""
    found: list[tuple[int, Question]] = []
    for skin in SKINS:
        for match in re.finditer(re.escape(skin.opening) + r".*?" + re.escape(skin.closing), text, re.DOTALL):
            words: list[tuple[int, str]] = []
            quantity = price = 0
            for clause in skin.clauses:
                pattern = re.escape(clause).replace(r"\{w\}", _WORD)
                pattern = pattern.replace(r"\{q\}", r"(?P<q>\d+)").replace(r"\{p\}", r"(?P<p>\d+)")
                place = re.search(pattern, match.group())
                if place is None:
                    continue
                words.append((place.start("w"), place["w"]))
                if "q" in place.groupdict():
                    quantity, price = int(place["q"]), int(place["p"])
            ordered = tuple(word for _, word in sorted(words))
            found.append((match.start(), Question(match.group(), skin, quantity, price, ordered)))
    return sorted(found, key=lambda pair: pair[0])


_NUMBER_WORDS = re.findall(r"\w+", "zero one two three four five six seven eight nine ten eleven twelve")
_N = r"(?P<n>\d+|" + "|".join(_NUMBER_WORDS[1:]) + r")"
_UNIT = r"(?:\s+(?:marks?|coins?|pearls?|units?))?"
_EACH = r"\s+(?:per|a|for each|for every|times the number of)\s+(?:single\s+)?(?:crates?|sacks?|lamps?|item|piece|unit)"
_IT = r"(?:\s+(?:the|that|this|it|your|amount|fee|toll|price|bill|total|result|running)){0,4}"
_ADD = r"(?:add(?:s|ing)?|plus|put(?:s|ting)?|(?:increase|raise)s?" + _IT + r"\s+by|a surcharge of|an extra)"
_SUBTRACT = (
    r"(?:subtract(?:s|ing)?|deduct(?:s|ing)?|minus|take(?:s)?\s+(?:away|off)|(?:reduce|lower)s?"
    + _IT
    + r"\s+by|a rebate of)"
)

_EFFECTS: tuple[tuple[Op, re.Pattern[str]], ...] = tuple(
    (op, re.compile(r"\b" + pattern, re.IGNORECASE))
    for op, pattern in (
        ("none", r"(?:leave" + _IT + r"\s+(?:unchanged|alone|as it is)|makes? no difference|changes? nothing)\b"),
        ("per_unit", _ADD + r"\s+" + _N + _UNIT + _EACH + r"\b"),
        ("add", _ADD + r"\s+" + _N + r"\b"),
        ("subtract", _SUBTRACT + r"\s+" + _N + r"\b"),
        ("subtract", r"takes?\s+" + _N + _UNIT + r"\s+(?:off|away)\b"),
        ("multiply", r"(?:multipl(?:y|ies)" + _IT + r"\s+by|times)\s+" + _N + r"\b"),
        ("multiply", r"(?P<double>doubl)(?:e|es|ed|ing)\b"),
        ("multiply", r"(?P<triple>tripl)(?:e|es|ed|ing)\b"),
        ("divide", r"(?:divide" + _IT + r"\s+by)\s+" + _N + r"\b"),
        ("divide", r"(?P<double>halve)(?:s|d)?\b"),
    )
)


def read_effect(text: str) -> tuple[int, int, Effect] | None:
    """The first effect that a text names: where it begins and ends, and what it does."""
    best: tuple[int, int, Effect] | None = None
    for op, pattern in _EFFECTS:
        match = pattern.search(text)
        if match is None or (best is not None and match.start() >= best[0]):
            continue
        groups = match.groupdict()
        if "n" in groups:
            raw = match["n"].lower()
            number = int(raw) if raw.isdigit() else _NUMBER_WORDS.index(raw)
        else:
            number = 2 if "double" in groups else 3 if "triple" in groups else 0
        if op == "divide" and number == 0:
            continue
        best = (match.start(), match.end(), Effect(op, number))
    return best


@dataclass(frozen=True)
class Statement:
    """A rule as a sentence states it: it holds where all of `words` occur; without words it always holds."""

    words: tuple[str, ...]
    effect: Effect


@dataclass(frozen=True)
class Memory:
    """A remembered bill: it holds for the same quantity, goods and price only."""

    quantity: int
    word: str
    price: int
    total: int


_NOT_A_WORD = frozenset(
    re.findall(
        r"\w+",
        """
        About Added After Always Answer Any Apply Before Bill Bills Check Concerning Deduct Divide Double Each Every
        Experience Experiences Final For From General Give Halve Increase Known Leave Lower Make Multiply Never Note
        Once Only Over Problem Question Raise Read Reduce Remember Rule Rules Should Show Start State Subtract Take
        Takes That Then There These This Those Triple Under What When Whenever Where Which With Work Your Here
        """,
    )
)
_BEFORE = re.compile(r"\b(?:when|whenever|if|for|on|with|from|under|over|at|by|in|any|every|each|once|should)\b", re.I)
_AFTER = re.compile(r"^[^.]*?\b(?:when|whenever|if|for|on|with|from|under|over|at|by|in case of)\b", re.I)
_SUBJECT = re.compile(r"^(?:\s+\w+){0,3}\s*(?::|,|\bmeans\b|\bcalls for\b|\brequires\b|$)", re.I)
_ALWAYS = re.compile(r"\b(?:always|in every case|whatever the order|at the very end)\b", re.I)
_MEMORY = re.compile(r"\b(\d+) \w+ of ([A-Z][a-z]+) at (\d+)\b.*?\b(?:is|comes to|make|makes)\s+(-?\d+)\b")


def _made_up(sentence: str, lexicon: frozenset[str] | None) -> list[tuple[int, str]]:
    found = [(match.start(), match.group()) for match in re.finditer(r"\b[A-Z][a-z]{3,}\b", sentence)]
    if lexicon is not None:
        return [(at, word) for at, word in found if word in lexicon]
    return [(at, word) for at, word in found if word not in _NOT_A_WORD]


@functools.lru_cache(maxsize=4096)
def read_statements(text: str, lexicon: frozenset[str] | None = None) -> tuple[Statement | Memory, ...]:
    """Every rule that a text states in sentences whose word order makes sense; anything else says nothing.

    `lexicon` holds the made-up words of a reader that knows them; without it capitals give them away.
    """
    found: list[Statement | Memory] = []
    for sentence in re.split(r"(?<=[.;!?])\s+|\n+", text):
        if len(sentence.split()) > 40:
            continue
        memory = _MEMORY.search(sentence)
        if memory:
            found.append(Memory(int(memory[1]), memory[2], int(memory[3]), int(memory[4])))
            continue
        effect = read_effect(sentence)
        if effect is None:
            continue
        begin, end, what = effect
        if re.search(r"\b(?:do not|don't|never)\s*$", sentence[:begin], re.I):
            what = Effect("none")
        words = _made_up(sentence, lexicon)
        if not words:
            if _ALWAYS.search(sentence):
                found.append(Statement((), what))
            continue
        first, name = words[0]
        if first < begin:
            stated = bool(_BEFORE.search(sentence[:first])) or bool(_SUBJECT.match(sentence[first + len(name) : begin]))
        else:
            stated = bool(_AFTER.match(sentence[end : first + len(name)]))
        if stated:
            found.append(Statement(tuple(dict.fromkeys(word for _, word in words)), what))
    return tuple(found)


@dataclass(frozen=True)
class Attempt:
    """A worked answer as read from text. A step without a word is one whose reason was not given."""

    text: str
    begin: int
    end: int
    start: int
    steps: tuple[tuple[str | None, Effect | None, int], ...]
    answer: int


_STEP = re.compile(r"^(?:(?P<word>[A-Z][a-z]+): (?P<how>.+), making|Then) (?P<amount>-?\d+)\.$", re.MULTILINE)


def find_attempts(text: str) -> list[Attempt]:
    """Every worked answer in a text."""
    attempts: list[Attempt] = []
    for match in re.finditer(r"Start: (\d+) x (\d+) = \d+\.\n(.*?)Answer: (-?\d+)", text, re.DOTALL):
        if "Start:" in match[3]:
            continue
        steps: list[tuple[str | None, Effect | None, int]] = []
        for step in _STEP.finditer(match[3]):
            how = read_effect(step["how"]) if step["word"] else None
            steps.append((step["word"], how[2] if how else None, int(step["amount"])))
        start = int(match[1]) * int(match[2])
        attempts.append(Attempt(match.group(), match.start(), match.end(), start, tuple(steps), int(match[4])))
    return attempts
