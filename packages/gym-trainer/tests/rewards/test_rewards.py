"""Guards the rewards: what counts as right, that no failure becomes a 0, and what is refused before any call."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from gym_sdk.errors import MissingExtra, SpecError
from gym_sdk.spec import (
    ExactReward,
    JsonReward,
    MathReward,
    NumericReward,
    PluginReward,
    PythonReward,
    RegexReward,
)
from gym_trainer.rewards import Reward, RewardFailed, RewardTimeout, build_reward
from gym_trainer.rewards import registry as registry_module
from gym_trainer.rewards.text import last_number, last_object


@pytest.mark.parametrize(
    ("spec", "answer", "reference", "reward"),
    [
        (ExactReward(), "  Paris\n", "Paris", 1.0),
        (ExactReward(), "paris", "Paris", 0.0),
        (ExactReward(ignore_case=True), "PARIS", "Paris", 1.0),
        (ExactReward(extract=r"Answer: (\w+)"), "Answer: B, no. Answer: C", "C", 1.0),
        (ExactReward(extract=r"Answer: (\w+)"), "C", "C", 0.0),
        (NumericReward(), "It is $1,234.50.", "1234.5", 1.0),
        (NumericReward(), "5.1", "5", 0.0),
        (NumericReward(absolute_tolerance=0.01), "0.33", "1/3 is 0.3333", 1.0),
        (NumericReward(relative_tolerance=0.1), "105", "100", 1.0),
        (NumericReward(), "no number here", "0", 0.0),
        (NumericReward(extract=r"Answer: (-?[\d.]+)"), "Answer: 4 (of 10)", "4", 1.0),
        (NumericReward(), "\u22123", "-3", 1.0),
        (RegexReward(pattern=r"\b{answer}\b"), "so x = 1+1 then", "1+1", 1.0),
        (RegexReward(pattern=r"^{answer}$"), "1x1", "1.1", 0.0),
        (RegexReward(pattern="YES", ignore_case=True), "yes", "", 1.0),
        (JsonReward(), 'Sure: ```json\n{"a": 1, "b": "x  y"}\n```', '{"a": 1, "b": "x y"}', 1.0),
        (JsonReward(), '{"a": 1, "b": 2}', '{"a": 1, "b": 3}', 0.5),
        (JsonReward(fields=["a"]), '{"a": 1, "b": 2}', '{"a": 1, "b": 3}', 1.0),
        (JsonReward(), '{"a": true}', '{"a": 1}', 0.0),
        (JsonReward(), '{"a": 1', '{"a": 1}', 0.0),
        (JsonReward(), '{"a": {"b": [1, 2]}}', '{"a": {"b": [1, 2]}}', 1.0),
    ],
)
def test_what_counts_as_right(spec: object, answer: str, reference: str, reward: float) -> None:
    assert build_reward(spec).score(answer, reference, "q") == reward  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3-7", 7),
        ("the 5th of 12", 12),
        ("v1.2.3", None),
        ("12,34", 34),
        ("1,234,567.8%", 1234567.8),
        ("2e3", 2000),
        (".5", 0.5),
        ("x2", None),
        ("(-4)", -4),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_the_last_object_is_the_outermost_one() -> None:
    assert last_object('{"a": {"b": 1}} and {"c": {"d": 2}}') == {"c": {"d": 2}}
    assert last_object("{" * 2000) is None


@pytest.mark.parametrize(
    ("spec", "reference", "complaint"),
    [
        (ExactReward(), " ", "the reference is empty"),
        (NumericReward(), "n/a", "the reference 'n/a' holds no number"),
        (NumericReward(), "7", None),
        (RegexReward(pattern="a"), "", None),
        (RegexReward(pattern="{answer}"), "", "the reference is empty"),
        (JsonReward(), "[1]", "the reference '[1]' is not a JSON object"),
        (JsonReward(fields=["z"]), '{"a": 1}', "the reference has no field 'z'"),
    ],
)
def test_references_that_cannot_be_compared_with_are_named(spec: object, reference: str, complaint: str | None) -> None:
    assert build_reward(spec).check(reference) == complaint  # pyright: ignore[reportArgumentType]


def test_a_broken_pattern_is_a_specification_error() -> None:
    for spec in (RegexReward(pattern="(["), ExactReward(extract="(["), NumericReward(extract="([")):
        with pytest.raises(SpecError, match="not a regular expression"):
            build_reward(spec)


@pytest.fixture(scope="module")
def math_reward() -> Iterator[Reward]:
    pytest.importorskip("math_verify")
    built = build_reward(MathReward(timeout_s=60))
    yield built
    built.close()


class TestMath:
    @pytest.fixture
    def reward(self, math_reward: Reward) -> Reward:
        return math_reward

    @pytest.mark.parametrize(
        ("answer", "reference", "score"),
        [
            (r"so the result is $\boxed{\frac{1}{2}}$", "0.5", 1.0),
            (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
            ("The answer is 42.", "42", 1.0),
            (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
            (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
            (r"\boxed{3}", "4", 0.0),
            ("I cannot tell.", "4", 0.0),
            (r"\boxed{72}", "48/2 = 24 clips. 48+24 = 72\n#### 72", 1.0),
        ],
    )
    def test_equality_is_mathematical(self, reward: Reward, answer: str, reference: str, score: float) -> None:
        assert reward.score(answer, reference, "q") == score

    def test_equal_answers_have_one_spelling(self, reward: Reward) -> None:
        assert reward.extract(r"\boxed{42}") == reward.extract("The answer is $42$") == "42"
        assert reward.extract("none") is None

    def test_an_answer_that_takes_too_long_has_no_reward_and_the_next_is_scored(self) -> None:
        pytest.importorskip("math_verify")
        reward = build_reward(MathReward(timeout_s=3))
        reward.score(r"\boxed{1}", "1", "q")
        with pytest.raises(RewardTimeout):
            reward.score(r"\boxed{10^{10^{10}} + 7^{7^{77}}}", "1", "q")
        assert reward.score(r"\boxed{1}", "1", "q") == 1.0
        reward.close()


def test_math_without_its_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r'pip install "gym-trainer\[math\]"'):
        build_reward(MathReward())


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(
        textwrap.dedent("""
        def length(answer, reference, question): return len(answer) == len(reference)
        def broken(answer, reference, question): raise ValueError("oh")
        def huge(answer, reference, question): return 7
        number = 3
        """)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("functions")
def test_a_function_of_the_users_is_a_reward_and_its_faults_are_not_zeros() -> None:
    assert build_reward(PythonReward(function="my_rewards:length")).score("abc", "xyz", "q") == 1.0
    with pytest.raises(RewardFailed, match="my_rewards:broken raised ValueError: oh"):
        build_reward(PythonReward(function="my_rewards:broken")).score("a", "b", "q")
    with pytest.raises(RewardFailed, match="returned 7; a reward is a number from 0 to 1"):
        build_reward(PythonReward(function="my_rewards:huge")).score("a", "b", "q")


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize("name", ["my_rewards:absent", "my_rewards:number", "no_such_module_at_all:f"])
def test_a_function_that_is_not_there_is_a_specification_error(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        build_reward(PythonReward(function=name))
    assert caught.value.exit_code == 2


class Longest:
    """A reward as another package would register it."""

    repeatable = True

    def __init__(self, spec: PluginReward) -> None:
        self.limit = spec.options["limit"]

    def score(self, answer: str, reference: str, question: str) -> float:
        return float(len(answer) <= self.limit)

    def check(self, reference: str) -> str | None:
        return None

    def extract(self, answer: str) -> str | None:
        return None

    def close(self) -> None: ...


def test_another_package_registers_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("their_package")
    module.Longest = Longest  # pyright: ignore[reportAttributeAccessIssue]
    module.Half = lambda spec: object()  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "their_package", module)
    points = {
        name: EntryPoint(name, f"their_package:{target}", registry_module.GROUP)
        for name, target in (("longest", "Longest"), ("half", "Half"))
    }
    points["exact"] = EntryPoint("exact", "gym_trainer.rewards.text:Exact", registry_module.GROUP)
    monkeypatch.setattr(registry_module, "registered_rewards", lambda: points)
    reward = build_reward(PluginReward(name="longest", options={"limit": 3}))
    assert (reward.score("abc", "", ""), reward.score("abcd", "", "")) == (1.0, 0.0)
    with pytest.raises(SpecError, match="cannot be built: KeyError"):
        build_reward(PluginReward(name="longest"))
    with pytest.raises(SpecError, match="has no repeatable, score, check, extract, close"):
        build_reward(PluginReward(name="half"))
    with pytest.raises(SpecError, match="known: exact, half, longest"):
        build_reward(PluginReward(name="shortest"))
    with pytest.raises(SpecError, match="one of Gym's own"):
        build_reward(PluginReward(name="exact"))


def test_gyms_own_rewards_are_registered_under_their_kinds() -> None:
    names = {name for name, point in registry_module.registered_rewards().items() if "gym_trainer" in point.value}
    assert names == {"math", "exact", "numeric", "regex", "json", "python"}


def test_rewards_load_neither_torch_nor_sympy() -> None:
    code = (
        "import sys; from gym_sdk.spec import NumericReward; from gym_trainer.rewards import build_reward;"
        "build_reward(NumericReward()); print([n for n in ('torch', 'sympy', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
