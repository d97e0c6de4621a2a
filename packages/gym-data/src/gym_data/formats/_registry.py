"""The known formats, and which of them a row has."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points

from gym_data.formats._base import Format, Row, RowError
from gym_data.formats.alpaca import Alpaca
from gym_data.formats.openai import OpenAI
from gym_data.formats.openai_preference import OpenAIPreference
from gym_data.formats.preference import Preference
from gym_data.formats.prompt import OpenAIReinforcement, Prompt
from gym_data.formats.prompt_completion import PromptCompletion
from gym_data.formats.sharegpt import ShareGPT
from gym_data.formats.stepwise import Stepwise
from gym_data.formats.text import Text
from gym_data.formats.tokens import Tokens
from gym_data.formats.unpaired import Unpaired
from gym_data.record import Source
from gym_sdk.errors import DataError

_OWN: tuple[type[Format], ...] = (
    Tokens,
    OpenAIPreference,
    ShareGPT,
    Alpaca,
    Preference,
    Unpaired,
    Stepwise,
    OpenAI,
    OpenAIReinforcement,
    PromptCompletion,
    Prompt,
    Text,
)
"""In order of detection: the first whose signature a row has."""


@cache
def formats() -> dict[str, Format]:
    """Every format by name, Gym's own first."""
    found: dict[str, Format] = {made.name: made for made in (kind() for kind in _OWN)}
    for entry in entry_points(group="gym.formats"):
        found.setdefault(entry.name, entry.load()())
    return found


def format_named(name: str) -> Format:
    """The format of that name. Raises DataError with the known ones."""
    try:
        return formats()[name]
    except KeyError:
        near = get_close_matches(name, formats(), 1)
        raise DataError(
            f"unknown format {name!r}; known are {', '.join(formats())}",
            hint=f"Did you mean {near[0]!r}?" if near else None,
        ) from None


def raise_near_miss(row: Row, source: Source) -> None:
    """Raise DataError with what is wrong inside a row that has the columns of a format, but not their types."""
    for found in formats().values():
        keys = found.signature.partition(" (")[0].split(", ")
        if not all(key in row for key in keys):
            continue
        try:
            found.to_record(row, source)
        except RowError as error:
            if error.path is not None:
                raise error.located(source) from None


def detect(row: Row) -> Format | None:
    """The format whose signature a row has."""
    return next((found for found in formats().values() if found.matches(row)), None)
