"""Guards the ways to learn without a held-out test, end to end over a real socket: without answers, as published."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import world_spec
from loopback import WORLD, served, train

from gym_data.experience import DEFAULT_HEADING, read_library
from gym_sdk.events import MetricEvent, read_events
from gym_sdk.spec import RunSpec, dump_yaml

FAULTLESS = dict.fromkeys(("wrong", "harmful", "duplicate", "overfitted"), 0.0)


def without_answers(spec: RunSpec) -> RunSpec:
    """The training rows as they come from someone who knows no answers; those of the test split keep theirs."""
    path = Path(spec.data.train[0].source)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("".join(json.dumps({**row, "answer": ""}) + "\n" for row in rows), encoding="utf-8")
    return spec


def requests_of(asked: list[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    return [each["request"] for each in asked if each["model"] == model]


def prompt_of(request: dict[str, Any]) -> str:
    return "\n".join(message["content"] for message in request["messages"])


@pytest.mark.parametrize("mode", ["majority", "critique"])
def test_rows_without_answers_still_teach_and_no_answer_is_ever_shown(tmp_path: Path, mode: str) -> None:
    with served(tmp_path, faults=FAULTLESS, log_requests=True) as (url, asked, _):
        spec = world_spec(
            tmp_path,
            WORLD,
            base_url=url,
            num_train=40,
            num_test=60,
            batch_size=20,
            epochs=2,
            ground_truth=mode,
            gate={"held_out": False} if mode == "majority" else {"enabled": False},
            report={"worth_questions": 0, "baselines": []},
        )
        report, run = train(without_answers(spec))
        teacher = [prompt_of(request) for request in requests_of(asked(), "teacher")]
    critiques = [text for text in teacher if "several attempts" in text]
    assert critiques
    assert not any("The correct answer is" in text for text in teacher), "there is none to be shown"
    if mode == "majority":
        assert all("most attempts agree on" in text for text in critiques)
        assert all("(correct)" in text and "(wrong)" in text for text in critiques), "a group without both is skipped"
    else:
        assert all("No grades are known" in text for text in critiques)
        assert not any("(correct)" in text or "(wrong)" in text for text in critiques)
        assert sum(step["num_groups_kept"] for step in report["steps"]) == 80, "every group is kept"
        assert all(step["mean_reward"] is None for step in report["steps"])
    nothing, library = report["accuracy"]
    assert read_library(run.path / "experience").items
    # What the majority's trial lets through helps; lessons that nothing checks do harm in this world, and it is shown.
    assert (library["accuracy"] > nothing["accuracy"] + 0.1) == (mode == "majority")


def test_student_and_teacher_have_endpoints_keys_and_prices_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_STUDENT", "one")
    monkeypatch.setenv("KEY_OF_TEACHER", "two")
    for name in ("student", "teacher"):
        (tmp_path / name).mkdir()
    with (
        served(tmp_path / "student", key="one") as student,
        served(tmp_path / "teacher", key="two") as teacher,
    ):
        spec = world_spec(
            tmp_path,
            WORLD,
            student={"base_url": student.url, "model": "student", "api_key_env": "KEY_OF_STUDENT"},
            teacher={
                "base_url": teacher.url,
                "model": "teacher",
                "api_key_env": "KEY_OF_TEACHER",
                "price": {"input_usd_per_million": 1.0, "output_usd_per_million": 4.0},
            },
            num_train=20,
            num_test=0,
            gate={"enabled": False},
        )
        report, run = train(spec)
        asked = {"student": student.asked(), "teacher": teacher.asked()}
    assert {name: {each["model"] for each in found} for name, found in asked.items()} == {
        "student": {"student"},
        "teacher": {"teacher"},
    }
    spent = report["money"]["training"]
    assert spent["calls"] == len(asked["student"]) + len(asked["teacher"])
    entries = [json.loads(line) for line in (run.path / "journal.jsonl").read_text(encoding="utf-8").splitlines()]
    role = {entry["key"]: entry["role"] for entry in entries if entry["type"] == "request" and "role" in entry}
    costs = dict.fromkeys(asked, 0.0)
    for entry in entries:
        if entry["type"] == "answer":
            costs[role[entry["key"]]] += entry["cost_usd"]
    assert costs["student"] == 0.0, "no price, and on this machine"
    assert costs["teacher"] == pytest.approx(spent["cost_usd"])
    live = [e.values["training_cost_usd"] for e in read_events(run.events_path) if isinstance(e, MetricEvent)]
    assert live[-1] == pytest.approx(spent["cost_usd"]), "told while it runs"


def test_gym_train_runs_where_no_framework_is_installed(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'peft', 'accelerate')))\n"
        "from gym_sdk.cli import main\n"
        "main()"
    )
    with served(tmp_path) as (url, *_):
        spec = world_spec(tmp_path, WORLD, base_url=url, num_train=20, num_test=10, gate={"held_out": False})
        (tmp_path / "run.yaml").write_text(dump_yaml(spec), encoding="utf-8")
        command = [sys.executable, "-c", script, "train", str(tmp_path / "run.yaml")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "report.html").is_file()
    assert read_library(run / "experience").items


def test_the_teacher_is_asked_in_the_words_of_the_specification(tmp_path: Path) -> None:
    """Braces in questions and attempts stay as they are; what an operation looks like is said by itself."""
    prompts = {
        "summary": "Say briefly. {question}\n{grade}{attempt}\nOf these: {experiences}",
        "critique": "Groups of {attempts}\n\n{question} {reference}\n{experiences}\n{task} {max_operations}",
        "consolidation": "As one: {proposals}\n{experiences}",
    }
    with served(tmp_path, faults=FAULTLESS, log_requests=True) as (url, asked, _):
        spec = world_spec(
            tmp_path,
            WORLD,
            base_url=url,
            num_train=20,
            num_test=0,
            summaries="always",
            prompts=prompts,
            instruction="Answer as {attempts} do.",
            gate={"enabled": False},
        )
        report, _ = train(spec)
        teacher = [prompt_of(request) for request in requests_of(asked(), "teacher")]
    begins = {name: [text for text in teacher if text.startswith(words[:6])] for name, words in prompts.items()}
    kept = report["steps"][0]["num_groups_kept"]
    assert {name: len(found) for name, found in begins.items()} == {
        "summary": 5 * kept,
        "critique": kept,
        "consolidation": 1,
    }
    assert sum(map(len, begins.values())) == len(teacher), "nothing is asked in other words"
    assert all(text.count('"operations"') == 1 for text in begins["critique"] + begins["consolidation"])
    assert all("Compare the correct attempts" in text and "at most" not in text for text in begins["critique"])
    assert report["steps"][0]["applied"], "what comes back is read as ever"


def test_a_group_without_a_majority_teaches_nothing(tmp_path: Path) -> None:
    """Two attempts that differ agree on nothing; two that agree hold no contrast."""
    with served(tmp_path, log_requests=True) as (url, asked, _):
        spec = world_spec(
            tmp_path,
            WORLD,
            base_url=url,
            num_train=20,
            num_test=0,
            group_size=2,
            ground_truth="majority",
            gate={"held_out": False},
        )
        report, _ = train(without_answers(spec))
        assert not requests_of(asked(), "teacher")
    assert report["did_not_work_out"]["groups skipped: all attempts alike"] == 20


def test_the_paper_preset_runs_as_published(tmp_path: Path) -> None:
    with served(tmp_path, log_requests=True) as (url, asked, _):
        spec = world_spec(
            tmp_path,
            WORLD,
            base_url=url,
            num_train=20,
            num_test=20,
            epochs=2,
            preset="paper",
            report={"worth_questions": 0, "baselines": []},
        )
        report, run = train(spec)
        student, teacher = (requests_of(asked(), model) for model in ("student", "teacher"))
    attempts = [request for request in student if request["temperature"] == 0.7]
    measured = [request for request in student if request["temperature"] == 0.3]
    assert len(attempts) == 2 * 20 * 5, "no trial and no gate"
    assert len(measured) == 2 * 20, "the test questions, before and after"
    assert all(request["top_p"] == 0.95 for request in measured)
    kept = sum(step["num_groups_kept"] for step in report["steps"])
    summaries = [request for request in teacher if "Summarise its attempt" in prompt_of(request)]
    assert len(summaries) == 5 * kept, "each attempt of a group with a contrast"
    assert all(request["temperature"] == 0.0 for request in teacher)
    with_library = [request for request in student if DEFAULT_HEADING in prompt_of(request)]
    assert len(with_library) == 20 * 5 + 20, "the second epoch's attempts and the measurement after it"
    for request in with_library:
        assert DEFAULT_HEADING in request["messages"][-1]["content"]
        assert request["messages"][-1]["role"] == "user", "after the question, in training and evaluation alike"
    assert all(step["gate"] is None and step["accepted"] for step in report["steps"])
    applied = sum(len(step["applied"]) for step in report["steps"])
    assert applied > 0
    assert not any("trial" in refused["why"] for step in report["steps"] for refused in step["refused"])
    assert read_library(run.path / "experience").placement == "user"
