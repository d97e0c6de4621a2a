"""A teacher that sees only messages: it reads attempts and grades, and induces rules from what sets them apart.

It answers four kinds of request, told apart by what the request holds and asks for: one attempt to be summarised,
attempts to draw lessons from, proposals to consolidate with a library, and a whole instruction to be rewritten (as
GEPA asks). It imports nothing that knows the hidden rules.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from simworld.language import Attempt, Effect, Question, Statement, find_attempts, find_questions, read_statements

Rule = tuple[str, Effect]


@dataclass(frozen=True)
class Faults:
    """Shares of proposals that are spoilt on purpose."""

    wrong: float = 0.1
    """Another number or operation."""

    harmful: float = 0.05
    """A general instruction that ruins every answer."""

    duplicate: float = 0.1
    """Something that the library says already, in other words."""

    overfitted: float = 0.1
    """One remembered bill instead of a rule."""

    malformed: float = 0.0
    """Whole answers that are not valid JSON."""


def reply(messages: list[dict[str, Any]], seed: int, faults: Faults = Faults()) -> str:
    """Answer a request. Equal messages and seed give an equal answer."""
    text = "\n".join(str(message["content"]) for message in messages)
    rng = random.Random(hashlib.sha256(json.dumps([text, seed]).encode()).digest())
    wants_operations = '"operations"' in text
    if rng.random() < faults.malformed and wants_operations:
        return '{"operations": [{"op": "add", "name": "Half an answ'
    evidence = _read_evidence(text)
    if not wants_operations:
        if "```" in text and "instruction" in text:
            return _rewrite(text, evidence, faults, rng)
        return _summarise(text, evidence)
    library = _read_library(text)
    proposals = _read_proposals(text)
    if evidence:
        operations = _criticise(evidence, library, _limit(text), faults, rng)
    elif proposals:
        operations = _consolidate(proposals, library, faults, rng)
    else:
        operations = _guess(text, _limit(text), faults, rng)
    return "Here is my answer.\n```json\n" + json.dumps({"operations": operations}, indent=1) + "\n```"


# Reading ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Graded:
    """An attempt with its question, its grade (None when the request gives none) and the reference answer."""

    question: Question
    attempt: Attempt
    right: bool | None
    reference: int | None


_VERDICT = re.compile(
    r"\b(incorrect|wrong|correct|right)\b(?! answer)|\b(?:grade|score|reward)\W{1,3}([01](?:\.\d+)?)", re.I
)
_REFERENCE = re.compile(r"\b(?:correct|reference|expected|right) answer\b\D{0,14}?(-?\d+)", re.I)


def _verdict(text: str) -> bool | None:
    match = _VERDICT.search(text)
    if match is None:
        return None
    return float(match[2]) >= 0.5 if match[2] else match[1].lower() in ("correct", "right")


def _read_evidence(text: str) -> list[Graded]:
    attempts = find_attempts(text)
    questions = find_questions(text)
    if not attempts or not questions:
        return []
    # Grades stand before each attempt, as a heading, or after it, as feedback. A heading is close to its attempt.
    headed = _verdict(text[max(0, attempts[0].begin - 120) : attempts[0].begin]) is not None
    graded: list[Graded] = []
    for index, attempt in enumerate(attempts):
        before = [pair for pair in questions if pair[0] < attempt.begin]
        question = (before or questions)[-1][1] if before else questions[0][1]
        previous = attempts[index - 1].end if index else 0
        following = attempts[index + 1].begin if index + 1 < len(attempts) else len(text)
        if headed:
            right = _verdict(text[max(previous, attempt.begin - 120) : attempt.begin])
        else:
            right = _verdict(text[attempt.end : min(following, attempt.end + 240)])
        references = _REFERENCE.findall(text[attempt.end : following]) or _REFERENCE.findall(text[: attempt.begin])
        graded.append(Graded(question, attempt, right, int(references[-1]) if references else None))
    if all(item.right is None for item in graded):
        most = Counter(item.attempt.answer for item in graded).most_common(1)[0]
        if most[1] > 1:
            graded = [Graded(g.question, g.attempt, g.attempt.answer == most[0], None) for g in graded]
    return graded


def _read_library(text: str) -> dict[str, str]:
    return {match[1]: match[2] for match in re.finditer(r"^\[(\w+)\] (.+)$", text, re.MULTILINE)}


def _read_proposals(text: str) -> list[dict[str, str]]:
    proposals: list[dict[str, str]] = []
    for line in text.splitlines():
        if line.startswith("{") and '"op"' in line:
            try:
                proposals.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return proposals


def _limit(text: str) -> int:
    match = re.search(r"\bat most (\w+) (?:operation|lesson|tip|experience)", text)
    words = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5}
    return (words.get(match[1]) or int(match[1])) if match and (match[1] in words or match[1].isdigit()) else 2


# Inducing -----------------------------------------------------------------------------------------------------------


def _steps(graded: Graded, rng: random.Random) -> dict[Rule, float]:
    """The steps of an attempt with their certainty: a step whose reason was not given is blamed on a word by guess."""
    attempt, question = graded.attempt, graded.question
    named = {word for word, _, _ in attempt.steps if word}
    rest = [word for word in question.words if word not in named]
    rules: dict[Rule, float] = {}
    amount = attempt.start
    for word, effect, after in attempt.steps:
        if word is not None and effect is not None and word != "Finally":
            rules[(word, effect)] = 1.0
        elif word is None and rest:
            rules.setdefault((rng.choice(rest), _effect_between(amount, after, question.quantity, rng)), 0.4)
        amount = after
    return rules


def _effect_between(before: int, after: int, quantity: int, rng: random.Random) -> Effect:
    difference = after - before
    options = [Effect("add", difference) if difference >= 0 else Effect("subtract", -difference)]
    if before > 0 and after > 0 and after % before == 0 and after // before in (2, 3):
        options.append(Effect("multiply", after // before))
    if difference > 0 and difference % quantity == 0 and difference // quantity <= 3:
        options.append(Effect("per_unit", difference // quantity))
    return rng.choice(options)


def _induce(evidence: list[Graded], known: list[Rule], rng: random.Random) -> list[tuple[Rule, float]]:
    """Rules by the weight of evidence, heaviest first: what right attempts do and wrong ones do not."""
    weight: dict[Rule, float] = defaultdict(float)
    for item in evidence:
        for rule, certainty in sorted(_steps(item, rng).items()):
            weight[rule] += certainty if item.right else -0.5 * certainty
    solved = {item.question.text for item in evidence if item.right}
    for item in evidence:
        if item.right:
            continue
        if item.question.text in solved:
            # The contrast: a word that wrong attempts handle and no right attempt does is best left alone.
            handled = {word for other in evidence if other.right for word, _ in _steps(other, rng)}
            for word, effect in sorted(_steps(item, rng)):
                if word not in handled and effect.op != "none":
                    weight[(word, Effect("none"))] += 0.3
        elif item.reference is not None and item.reference != item.attempt.answer:
            # Without a right attempt there is only the gap to the reference; words that the attempt or the known
            # rules account for are blamed last.
            gap = _effect_between(item.attempt.answer, item.reference, item.question.quantity, rng)
            settled = {word for word, _, _ in item.attempt.steps} | {word for word, _ in known}
            blamed = [word for word in item.question.words if word not in settled] or list(item.question.words)
            weight[(rng.choice(blamed), gap)] += 0.4
    best: dict[str, tuple[Rule, float]] = {}
    for rule, value in sorted(weight.items()):
        if value > 0 and (rule[0] not in best or value > best[rule[0]][1]):
            best[rule[0]] = (rule, value)
    return sorted(best.values(), key=lambda pair: (-pair[1], pair[0]))


# Writing ------------------------------------------------------------------------------------------------------------


def _phrase(effect: Effect, rng: random.Random) -> str:
    n = effect.number
    options = {
        "add": (f"put {n} on top", f"raise the total by {n}", f"there is a surcharge of {n}"),
        "subtract": (f"take {n} off", f"reduce the total by {n}", f"deduct {n}"),
        "multiply": (f"the total is to be taken times {n}", f"multiply the running total by {n}"),
        "per_unit": (f"put {n} per item on top", f"raise the total by {n} for every piece"),
        "divide": (f"divide the total by {n}",),
        "none": ("it changes nothing", "leave the total as it is"),
    }
    return rng.choice(options[effect.op])


def _sentence(rule: Rule, rng: random.Random) -> str:
    word, effect = rule
    phrase = _phrase(effect, rng)
    return rng.choice((f"If {word} appears, {phrase}.", f"With {word}, {phrase}.", f"{word}: {phrase}."))


_HARMFUL = (
    "Always halve the total before answering.",
    "At the very end add 7 to be safe.",
    "In every case double the total once more.",
    "Always take away 4 from the result.",
)


def _spoil(rule: Rule, item: Graded | None, known: list[Rule], faults: Faults, rng: random.Random) -> tuple[str, str]:
    """Write a rule as a named lesson, or spoil it in one of the ways of `faults`."""
    draw = rng.random()
    word, effect = rule
    if draw < faults.harmful:
        return "General care", rng.choice(_HARMFUL)
    draw -= faults.harmful
    if draw < faults.wrong:
        if effect.op == "none":
            return f"On {word}", _sentence((word, Effect("add", rng.randint(2, 9))), rng)
        number = effect.number + rng.choice((-1, 1, 2))
        return f"On {word}", _sentence((word, Effect(effect.op, max(1, number))), rng)
    draw -= faults.wrong
    if draw < faults.overfitted and item is not None:
        q = item.question
        total = item.attempt.answer if item.right or item.reference is None else item.reference
        return "A known bill", f"{q.quantity} pieces of {_goods(q)} at {q.price} comes to {total}."
    draw -= faults.overfitted
    if draw < faults.duplicate and known:
        again = rng.choice(known)
        return f"Concerning {again[0]}", _sentence(again, rng)
    return f"On {word}", _sentence(rule, rng)


def _goods(question: Question) -> str:
    match = re.search(r"\d+ \w+ of ([A-Z][a-z]+) at", question.text)
    return match[1] if match else question.words[0]


def _rules_of(text: str) -> list[Statement]:
    return [s for s in read_statements(text) if isinstance(s, Statement)]


def _summarise(text: str, evidence: list[Graded]) -> str:
    if not evidence:
        return "There is no attempt to summarise."
    item = evidence[-1]
    # Items are numbered in the student's prompt; a summary names those whose rule the attempt carried out.
    done = {(word, effect) for word, effect, _ in item.attempt.steps if word}
    used = [
        key
        for key, content in _read_library(text).items()
        if any((s.words[0] if s.words else "Finally", s.effect) in done for s in _rules_of(content))
    ]
    verdict = {True: "It is right.", False: "It is wrong.", None: ""}[item.right]
    cited = f"\nUsed: {', '.join(used)}" if used else "\nUsed: none"
    return f"The attempt went like this.\n{item.attempt.text}\n{verdict}{cited}"


def _criticise(
    evidence: list[Graded], library: dict[str, str], limit: int, faults: Faults, rng: random.Random
) -> list[dict[str, str]]:
    stated = {key: _rules_of(content) for key, content in library.items()}
    known = [(s.words[0], s.effect) for rules in stated.values() for s in rules if s.words]
    operations: list[dict[str, str]] = []
    # A general instruction that only wrong attempts carried out has to go.
    culprits = {e for g in evidence if not g.right for word, e, _ in g.attempt.steps if word == "Finally" and e}
    for key, rules in stated.items():
        if any(not s.words and s.effect in culprits for s in rules):
            operations.append({"op": "delete", "id": key})
    for rule, _ in _induce(evidence, known, rng):
        if len(operations) >= limit:
            break
        clash = [k for k, rules in stated.items() if any(s.words[:1] == (rule[0],) for s in rules)]
        if rule in known:
            continue
        item = next((g for g in evidence if rule[0] in g.question.words), None)
        name, text = _spoil(rule, item, known, faults, rng)
        if clash and rule[0] in text:
            operations.append({"op": "update", "id": clash[0], "name": name, "text": text})
        else:
            operations.append({"op": "add", "name": name, "text": text})
    return operations[:limit]


def _consolidate(
    proposals: list[dict[str, str]], library: dict[str, str], faults: Faults, rng: random.Random
) -> list[dict[str, str]]:
    """One operation a word, the effect that most proposals name; other texts pass through once."""
    support: dict[str, Counter[Effect]] = defaultdict(Counter)
    kept: dict[tuple[str, Effect], dict[str, str]] = {}
    others: dict[str, dict[str, str]] = {}
    for proposal in proposals:
        rules = _rules_of(proposal.get("text", ""))
        if proposal["op"] == "delete" or not rules or not rules[0].words:
            others.setdefault(json.dumps(proposal, sort_keys=True), proposal)
            continue
        support[rules[0].words[0]][rules[0].effect] += 1
        kept.setdefault((rules[0].words[0], rules[0].effect), proposal)
    held: dict[str, tuple[str, Effect]] = {}
    for key, content in library.items():
        for rule in _rules_of(content):
            if rule.words:
                held[rule.words[0]] = (key, rule.effect)
    operations: list[dict[str, str]] = []
    for word in sorted(support):
        effect, votes = support[word].most_common(1)[0]
        proposal = kept[(word, effect)]
        if word not in held:
            operations.append({"op": "add", "name": proposal["name"], "text": proposal["text"]})
        elif held[word][1] == effect:
            if rng.random() < faults.duplicate:
                operations.append({"op": "add", "name": proposal["name"], "text": proposal["text"]})
            else:
                operations.append({"op": "keep", "id": held[word][0]})
        elif votes > 1 or rng.random() < 0.5:
            update = {"op": "update", "id": held[word][0], "name": proposal["name"], "text": proposal["text"]}
            operations.append(update)
    return operations + [others[key] for key in sorted(others)]


def _guess(text: str, limit: int, faults: Faults, rng: random.Random) -> list[dict[str, str]]:
    """Tips from questions and answers alone: the gap between the plain product and the answer, blamed on a word."""
    operations: list[dict[str, str]] = []
    found = find_questions(text)
    for index, (begin, question) in enumerate(found):
        until = found[index + 1][0] if index + 1 < len(found) else len(text)
        answer = re.search(r"\banswer\b\D{0,14}?(-?\d+)", text[begin + len(question.text) : until], re.I)
        if answer is None or len(operations) >= limit:
            continue
        gap = _effect_between(question.start, int(answer[1]), question.quantity, rng)
        name, lesson = _spoil((rng.choice(question.words), gap), None, [], faults, rng)
        operations.append({"op": "add", "name": name, "text": lesson})
    return operations


def _rewrite(text: str, evidence: list[Graded], faults: Faults, rng: random.Random) -> str:
    """Rewrite an instruction: what it says already, corrected where the evidence contradicts it, and what is new."""
    current = text.split("```")[1].strip()
    culprits = {e for g in evidence if not g.right for word, e, _ in g.attempt.steps if word == "Finally" and e}
    lines = [
        line for line in current.splitlines() if not any(not s.words and s.effect in culprits for s in _rules_of(line))
    ]
    known = [(s.words[0], s.effect) for line in lines for s in _rules_of(line) if s.words]
    for rule, _ in _induce(evidence, known, rng):
        if rule in known:
            continue
        item = next((g for g in evidence if rule[0] in g.question.words), None)
        _, lesson = _spoil(rule, item, known, faults, rng)
        if rule[0] in lesson:
            lines = [line for line in lines if not any(s.words[:1] == (rule[0],) for s in _rules_of(line))]
        if lesson not in lines:
            lines.append(lesson)
    return "```\n" + "\n".join(lines) + "\n```"
