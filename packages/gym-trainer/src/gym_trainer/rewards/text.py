"""Rewards that compare texts: exact, regex, numeric, json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from gym_sdk.errors import SpecError, Where
from gym_sdk.spec.rewards import ExactReward, JsonReward, NumericReward, RegexReward

# A sign belongs to a number only where no digit or letter stands right before it: the 7 of "3-7" is not negative.
NUMBER = re.compile(r"(?<![\w.])[-+\u2212]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d+)?(?![\w])")


def compile_pattern(pattern: str, path: str, flags: int = 0) -> re.Pattern[str]:
    """A user's regular expression. Raises SpecError that says where it is wrong."""
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise SpecError(f"not a regular expression: {error}", where=Where(path=path)) from None


def last_match(pattern: re.Pattern[str] | None, text: str) -> str | None:
    """The last match of a pattern, its first group where it has one; the whole text without a pattern."""
    if pattern is None:
        return text
    found = None
    for found in pattern.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    if found is None:
        return None
    return found[1] if pattern.groups and found[1] is not None else found[0]


def one_spacing(text: str) -> str:
    return " ".join(text.split())


class _TextReward:
    repeatable = True
    all_or_nothing = True

    def check(self, reference: str) -> str | None:
        return None if reference.strip() else "the reference is empty"

    def close(self) -> None:
        """Nothing is held."""


class Exact(_TextReward):
    """1 when answer and reference are the same text, white space aside."""

    def __init__(self, spec: ExactReward) -> None:
        self._fold = spec.ignore_case
        self._pattern = compile_pattern(spec.extract, "method.reward.extract") if spec.extract else None

    def extract(self, answer: str) -> str | None:
        found = last_match(self._pattern, answer)
        if found is None:
            return None
        found = one_spacing(found)
        return found.casefold() if self._fold else found

    def score(self, answer: str, reference: str, question: str) -> float:
        expected = one_spacing(reference)
        return float(self.extract(answer) == (expected.casefold() if self._fold else expected))


class Numeric(_TextReward):
    """1 when the last number of the answer is within the tolerance of the reference."""

    def __init__(self, spec: NumericReward) -> None:
        self._absolute, self._relative = spec.absolute_tolerance, spec.relative_tolerance
        self._pattern = compile_pattern(spec.extract, "method.reward.extract") if spec.extract else None

    def check(self, reference: str) -> str | None:
        return None if last_number(reference) is not None else f"the reference {reference[:60]!r} holds no number"

    def extract(self, answer: str) -> str | None:
        found = last_match(self._pattern, answer)
        number = None if found is None else last_number(found)
        return None if number is None else repr(number)

    def score(self, answer: str, reference: str, question: str) -> float:
        found, expected = self.extract(answer), last_number(reference)
        if found is None or expected is None:
            return 0.0
        # One unit of the last place in doubles, so that 0.1 + 0.2 lies within 0 of 0.3 at any tolerance.
        allowed = max(self._absolute, self._relative * abs(expected)) + 4 * math.ulp(expected)
        return float(abs(float(found) - expected) <= allowed)


class Regex(_TextReward):
    """1 when the pattern, with the reference in it, occurs in the answer."""

    def __init__(self, spec: RegexReward) -> None:
        self._pattern, self._flags = spec.pattern, re.IGNORECASE if spec.ignore_case else 0
        self._needs_reference = "{answer}" in spec.pattern
        self._compiled("0")

    def _compiled(self, reference: str) -> re.Pattern[str]:
        pattern = self._pattern.replace("{answer}", re.escape(reference.strip()))
        return compile_pattern(pattern, "method.reward.pattern", self._flags)

    def check(self, reference: str) -> str | None:
        return super().check(reference) if self._needs_reference else None

    def extract(self, answer: str) -> str | None:
        return None

    def score(self, answer: str, reference: str, question: str) -> float:
        return float(self._compiled(reference).search(answer) is not None)


class Json(_TextReward):
    """The share of the reference's fields that the answer has with an equal value."""

    all_or_nothing = False

    def __init__(self, spec: JsonReward) -> None:
        self._fields = spec.fields

    def check(self, reference: str) -> str | None:
        expected = last_object(reference)
        if expected is None:
            return f"the reference {reference[:60]!r} is not a JSON object"
        missing = [name for name in self._fields or () if name not in expected]
        return f"the reference has no field {missing[0]!r}" if missing else None

    def extract(self, answer: str) -> str | None:
        found = last_object(answer)
        if found is None:
            return None
        wanted = {name: found.get(name) for name in self._fields} if self._fields else found
        return json.dumps(wanted, sort_keys=True, ensure_ascii=False)

    def score(self, answer: str, reference: str, question: str) -> float:
        expected, found = last_object(reference), last_object(answer)
        if not expected or found is None:
            return float(expected == found)
        names = self._fields or list(expected)
        return sum(name in found and _equal(found[name], expected[name]) for name in names) / len(names)


def last_number(text: str) -> float | None:
    """The last number in a text: `1,234.5`, `-3`, `.5`, `2e3`, `$4`, `7 %`."""
    found = [match for match in NUMBER.findall(text) if any(character.isdigit() for character in match)]
    return float(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def last_object(text: str) -> dict[str, Any] | None:
    """The last JSON object that stands in a text at the outermost level, bare or in a code fence."""
    found = None
    for value in objects_in(text):
        found = value
    return found


def objects_in(text: str) -> Iterator[dict[str, Any]]:
    """Every outermost JSON object in a text, in order."""
    decoder = json.JSONDecoder()
    position = text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
        except (json.JSONDecodeError, RecursionError):
            end = position + 1
        else:
            if isinstance(value, dict):
                yield value
        position = text.find("{", end)


def _equal(a: Any, b: Any) -> bool:
    # JSON tells 1 and true apart; Python does not.
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    if isinstance(a, str) and isinstance(b, str):
        return one_spacing(a) == one_spacing(b)
    return bool(a == b)
