"""Personal data that has a form: addresses of mail, telephone numbers, cards, accounts, machines."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable

from gym_data.record import Message, Record

_PATTERNS: dict[str, re.Pattern[str]] = {
    "email": re.compile(r"\b[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+\b"),
    "iban": re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,4})?\b"),
    "card": re.compile(r"\b\d(?:[ -]?\d){12,18}\b"),
    "ip": re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b"),
    "phone": re.compile(
        r"(?<![\w.])(?:\+\d{1,3}[ .-]?(?:\(0\))?\d{1,5}|\(\d{2,5}\)[ .-]?\d{2,5}|0\d{1,4}[ /.-]\d{2,5})"
        r"(?:[ .-]?\d{2,5}){1,3}(?!\w)"
    ),
}  # fmt: skip


def masked(text: str, found: Counter[str]) -> str:
    """The text with `[EMAIL]` and the like in the place of personal data, which is counted by kind."""
    for kind, pattern in _PATTERNS.items():
        is_valid = _VALID.get(kind)

        def put(match: re.Match[str], kind: str = kind, is_valid: Callable[[str], bool] | None = is_valid) -> str:
            if is_valid is not None and not is_valid(match.group()):
                return match.group()
            found[kind] += 1
            return f"[{kind.upper()}]"

        text = pattern.sub(put, text)
    return text


def masked_record(record: Record, found: Counter[str]) -> Record:
    """The record with its texts and call arguments masked."""

    def message(given: Message) -> Message:
        parts = tuple(
            part._replace(
                text=None if part.text is None else masked(part.text, found),
                call=part.call and part.call._replace(arguments_json=masked(part.call.arguments_json, found)),
            )
            for part in given.parts
        )
        return given._replace(parts=parts)

    return record._replace(
        prompt=tuple(map(message, record.prompt)),
        candidates=tuple(
            candidate._replace(messages=tuple(map(message, candidate.messages))) for candidate in record.candidates
        ),
    )


def _luhn(text: str) -> bool:
    digits = [int(digit) for digit in text if digit.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _iban(text: str) -> bool:
    plain = text.replace(" ", "")
    if not 15 <= len(plain) <= 34:
        return False
    return int("".join(str(int(char, 36)) for char in plain[4:] + plain[:4])) % 97 == 1


def _ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


_VALID: dict[str, Callable[[str], bool]] = {"card": _luhn, "iban": _iban, "ip": _ip}
