"""`reward:` how an answer is verified. Every reward lies between 0 and 1."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gym_sdk.spec._base import SpecModel


class MathReward(SpecModel):
    """Symbolic equivalence of the last boxed or stated expression (math-verify)."""

    kind: Literal["math"] = "math"
    """1 when the answer equals the reference as mathematics: 1/2, 0.5 and \\\\frac{1}{2} are one."""

    timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """The longest comparison. One that takes longer is not scored, and counted."""


class ExactReward(SpecModel):
    """Equality of texts."""

    kind: Literal["exact"] = "exact"
    """1 when the whole answer, or what `extract` finds in it, equals the reference."""

    ignore_case: bool = False
    """Whether A and a are equal. White space at the ends and its amount between words never matter."""

    extract: str | None = None
    """A regular expression that finds the answer in the text; its last match counts, the first group where it has
    one. The whole text when not given."""


class NumericReward(SpecModel):
    """Nearness of numbers."""

    kind: Literal["numeric"] = "numeric"
    """1 when the last number of the answer is near the reference. Thousands separators, currency signs and percent
    signs are understood."""

    absolute_tolerance: Annotated[float, Field(ge=0)] = 1e-6
    """How far the answer may be from the reference."""

    relative_tolerance: Annotated[float, Field(ge=0)] = 0.0
    """The same as a share of the reference; the wider of both counts."""

    extract: str | None = None
    """A regular expression that finds the number in the text; its last match counts. The last number of the text when
    not given."""


class RegexReward(SpecModel):
    """A pattern that must occur."""

    kind: Literal["regex"] = "regex"
    """1 when the pattern occurs in the answer."""

    pattern: Annotated[str, Field(min_length=1)]
    """A regular expression; `{answer}` in it stands for the row's reference, taken literally."""

    ignore_case: bool = False
    """Whether A and a are equal."""


class JsonReward(SpecModel):
    """Fields of a JSON object."""

    kind: Literal["json"] = "json"
    """The share of the reference's fields that the answer's JSON object has with an equal value; 0 without one."""

    fields: list[str] | None = None
    """The fields that count; all of the reference's when not given."""


class PythonReward(SpecModel):
    """A function of yours, run in this process with your rights."""

    kind: Literal["python"] = "python"
    """What the function returns: a number from 0 to 1, or a truth value."""

    function: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", examples=["my_rewards:score"])]
    """`module:function`, called as `function(answer, reference, question)` with three texts."""


class PluginReward(SpecModel):
    """A reward that another package registers under the entry point group `gym.rewards`."""

    kind: Literal["plugin"] = "plugin"
    """What the registered reward returns."""

    name: Annotated[str, Field(min_length=1)]
    """The entry point's name."""

    options: dict[str, bool | int | float | str] = {}
    """Keyword arguments of the registered factory."""


RewardSpec = Annotated[
    MathReward | ExactReward | NumericReward | RegexReward | JsonReward | PythonReward | PluginReward,
    Field(discriminator="kind"),
]
