"""Guards that a mistake is one message, with exit code 2, before any call is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import world_spec
from simworld.tasks import World

from gym_sdk.errors import GymError
from gym_sdk.rundir import RunDir
from gym_sdk.spec import TrainingFreeGrpo
from gym_trainer.experience.run import Network, train_experience

WORLD = World.make(1)
PRICE = {"input_usd_per_million": 1.0, "output_usd_per_million": 4.0}


def no_calls(request: httpx.Request) -> httpx.Response:
    assert request.method == "GET", "a call was made before the mistake was found"
    return httpx.Response(200, json={"data": []})


def attempt(folder: Path, **method: Any) -> None:
    spec = world_spec(folder, WORLD, **{"num_train": 80, "num_test": 10, **method})
    run = RunDir.create(spec.output.dir, spec.name)
    train_experience(spec, run, network=Network(transport=httpx.MockTransport(no_calls)))


def without_answers(folder: Path) -> dict[str, Any]:
    return {"answer_field": None, "gate": {"enabled": False}}


def nonsense_library(folder: Path) -> dict[str, Any]:
    (folder / "library.yaml").write_text("format: gym-experience/1\nexperiences:\n- Divide, then round.\n")
    return {"library": {"initial": str(folder / "library.yaml")}}


def missing_library(folder: Path) -> dict[str, Any]:
    return {"library": {"initial": str(folder / "nowhere.yaml")}}


CASES: list[tuple[str, Callable[[Path], dict[str, Any]], str]] = [
    ("no answers", without_answers, "the row has no reference answer (and 79 more rows)"),
    ("nonsense library", nonsense_library, "library.yaml:3: an experience is a mapping with the keys name, text"),
    ("missing library", missing_library, "there is no such experience library"),
    (
        "too few calls",
        lambda folder: {"budget": {"training": {"calls": 50}}},
        "method.budget.training.calls: is 50, and one batch of attempts needs at least 100",
    ),
    (
        "too few tokens",
        lambda folder: {"budget": {"training": {"tokens": 100}}},
        "method.budget.training.tokens: is 100, and one batch of attempts needs at least",
    ),
    (
        "too little money",
        lambda folder: {
            "student": {"base_url": "http://127.0.0.1:1/v1", "model": "student", "price": PRICE},
            "budget": {"training": {"cost_usd": 0.0001}},
        },
        "method.budget.training.cost_usd: is 0.0001, and one batch of attempts needs at least",
    ),
    (
        "too few calls to evaluate",
        lambda folder: {"budget": {"evaluation": {"calls": 5}}},
        "method.budget.evaluation.calls: is 5, and the test questions once needs at least 10",
    ),
    (
        "a cap without prices",
        lambda folder: {
            "student": {"base_url": "https://api.example/v1", "model": "student"},
            "budget": {"training": {"cost_usd": 5.0}},
        },
        "a cap on cost needs the prices of the student endpoint",
    ),
    (
        "references of another kind",
        lambda folder: {"reward": {"kind": "json"}},
        "is not a JSON object, which the json reward needs",
    ),
    (
        "no key",
        lambda folder: {"student": {"base_url": "http://127.0.0.1:1/v1", "api_key_env": "GYM_TEST_NO_SUCH_KEY"}},
        "GYM_TEST_NO_SUCH_KEY",
    ),
    (
        "no function",
        lambda folder: {"reward": {"kind": "python", "function": "json:no_such_function"}},
        "json has no function no_such_function",
    ),
]


@pytest.mark.parametrize(("make", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_mistake_is_one_message_before_any_call(
    tmp_path: Path, make: Callable[[Path], dict[str, Any]], message: str
) -> None:
    with pytest.raises(GymError) as caught:
        attempt(tmp_path, **make(tmp_path))
    assert message in str(caught.value)
    assert caught.value.exit_code == 2
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adapter": {"rank": 8}}, "training_free_grpo trains no weights"),
        ({"train": {"epochs": 3.0}}, "set method.epochs and method.batch_size"),
        ({"output": {"merge": True}}, "has no adapter to merge"),
        ({"method": {"ground_truth": "critique"}}, "without grades there is nothing to test"),
        ({"method": {"ground_truth": "majority"}}, "is no measure of a gain"),
        ({"method": {"answer_field": "a"}}, "needs method.question_field"),
        (
            {"method": {"gate": {"enabled": False}, "pruning": {"enabled": True}}},
            "has to pass the held-out test, which is off",
        ),
        ({"method": {"gate": {"held_out": False, "trial_attempts": 0}}}, "neither of its stages"),
        (
            {
                "method": {
                    "ground_truth": "majority",
                    "gate": {"enabled": False},
                    "reward": {"kind": "regex", "pattern": "x"},
                }
            },
            "a majority needs answers that can be compared",
        ),
        ({"method": {"gate": {"enabld": True}}}, "did you mean enabled?"),
        ({"method": {"prompts": {"critique": "{question}"}}}, "must have {experiences} where that is to stand"),
        (
            {"method": {"prompts": {"consolidation": "{experiences} {proposals} {library}"}}},
            "nothing fills in {library}; there are {experiences}, {proposals}, {max_words}",
        ),
        ({"method": {"student": {"base_url": "localhost:8000"}}}, "base_url"),
    ],
)
def test_settings_that_cannot_stand_together_are_specification_errors(change: dict[str, Any], message: str) -> None:
    from gym_sdk.errors import SpecError
    from gym_sdk.spec import spec_from_data

    data: dict[str, Any] = {
        "model": {"source": "m"},
        "data": {"train": [{"source": "t.jsonl"}]},
        **change,
        "method": {"kind": "training_free_grpo", **change.get("method", {})},
    }
    with pytest.raises(SpecError) as caught:
        spec_from_data(data)
    assert message in str(caught.value)


def test_an_endpoints_model_needs_no_second_name() -> None:
    from gym_sdk.errors import SpecError
    from gym_sdk.spec import parse_spec, spec_from_data

    data: dict[str, Any] = {
        "method": {"kind": "training_free_grpo", "student": {"model": "some-model"}},
        "data": {"train": [{"source": "t.jsonl"}]},
    }
    assert parse_spec(json.dumps(data)).model.source == "some-model"
    assert spec_from_data({**data, "model": {"source": "weights"}}).model.source == "weights"
    with pytest.raises(SpecError, match=r"method\.student\.model: required: the name that the endpoint knows it by"):
        spec_from_data({**data, "method": {"kind": "training_free_grpo"}})
    with pytest.raises(SpecError, match="model: required"):
        spec_from_data({"data": data["data"]})


def test_the_paper_preset_fills_in_what_was_published_and_keeps_what_is_given() -> None:
    from gym_sdk.spec import dump_yaml, spec_from_data

    spec = spec_from_data(
        {
            "model": {"source": "m"},
            "data": {"train": [{"source": "t.jsonl"}]},
            "method": {"kind": "training_free_grpo", "preset": "paper", "library": {"max_item_words": 40}},
        }
    )
    method = spec.method
    assert method.kind == "training_free_grpo"
    assert (method.batch_size, method.group_size, method.epochs) == (100, 5, 3)
    assert (method.rollout.temperature, method.evaluation.temperature, method.updater.temperature) == (0.7, 0.3, 0.0)
    assert method.rollout.max_tokens == 16_384
    assert (method.summaries, method.library.placement, method.gate.enabled) == ("always", "user", False)
    assert (method.library.max_item_words, method.library.drop_duplicates) == (40, False)
    assert "preset: paper" in dump_yaml(spec)


def test_a_part_of_the_sampling_keeps_the_defaults_of_its_purpose() -> None:
    """Evaluation at the rollouts' temperature is a fault of published code."""
    method = TrainingFreeGrpo.model_validate(
        {"rollout": {"max_tokens": 9}, "evaluation": {"max_tokens": 9}, "updater": {"top_p": 0.5}}
    )
    assert (method.rollout.temperature, method.rollout.top_p, method.rollout.max_tokens) == (0.7, None, 9)
    assert (method.evaluation.temperature, method.evaluation.top_p, method.evaluation.max_tokens) == (0.3, 0.95, 9)
    assert (method.updater.temperature, method.updater.top_p, method.updater.max_tokens) == (0.0, 0.5, 4096)


def test_a_question_set_that_is_its_own_mistake_names_the_row(tmp_path: Path) -> None:
    rows = [{"question": f"Question {n}", "answer": "7" if n else "none"} for n in range(80)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = world_spec(tmp_path, WORLD, num_train=80, num_test=0)
    data = spec.data.model_copy(
        update={"train": [spec.data.train[0].model_copy(update={"source": str(tmp_path / "rows.jsonl")})]}
    )
    spec = spec.model_copy(update={"data": data})
    run = RunDir.create(spec.output.dir, spec.name)
    with pytest.raises(GymError, match=r"rows\.jsonl:1: the reference 'none' holds no number") as caught:
        train_experience(spec, run, network=Network(transport=httpx.MockTransport(no_calls)))
    assert caught.value.exit_code == 2


def test_gym_train_ends_with_exit_code_2_where_no_endpoint_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gym_sdk.cli._root import run as gym
    from gym_sdk.spec import dump_yaml

    spec = world_spec(tmp_path, WORLD, num_train=80, num_test=10)
    (tmp_path / "run.yaml").write_text(dump_yaml(spec), encoding="utf-8")
    assert gym(["train", str(tmp_path / "run.yaml")]) == 2
    said = capsys.readouterr().err
    assert "the student endpoint http://127.0.0.1:1/v1 cannot be reached" in said
    assert "Traceback" not in said
