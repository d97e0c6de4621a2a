"""Guards what a run leaves behind: artifacts, versions, reports, and the commands that handle them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness import run_in_process
from simworld.server import Service
from simworld.tasks import World

from gym_data.experience import Experience, ExperienceLibrary, read_library, write_library
from gym_sdk.cli._root import run as gym
from gym_sdk.rundir import RunDir
from gym_trainer.experience.evaluation import Arm, placebo_of
from gym_trainer.experience.html import MAX_BYTES, bars, render_html

WORLD = World.make(3)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], RunDir]:
    """A run that accepts libraries: 30 gate questions that let nearly everything pass."""
    return run_in_process(
        tmp_path_factory.mktemp("finished"),
        Service(WORLD),
        num_train=50,
        num_test=40,
        batch_size=10,
        gate={"share": 0.6, "delta": 0.4},
        report={"worth_questions": 10},
        summaries="always",
    )


def test_provenance_leads_from_each_item_to_questions_and_rollouts_in_the_journal(finished) -> None:
    _, run = finished
    provenance = json.loads((run.path / "experience" / "provenance.json").read_text(encoding="utf-8"))
    library = read_library(run.path / "experience")
    assert list(provenance["items"]) == [item.id for item in library.items] != []
    journal = [json.loads(line) for line in (run.path / "journal.jsonl").read_text(encoding="utf-8").splitlines()]
    answered = {entry["key"] for entry in journal if entry["type"] == "answer"}
    questions = set(json.loads((run.data_dir / "questions.json").read_text(encoding="utf-8"))["train"])
    for record in provenance["items"].values():
        assert record["operations"]
        for operation in record["operations"]:
            assert operation["op"] in ("add", "update")
            assert set(operation["questions"]) <= questions
            for rollouts in operation["questions"].values():
                assert len(rollouts) == 5
                assert set(rollouts) <= answered


def test_counts_come_from_attempts_that_followed_an_item(finished) -> None:
    report, _ = finished
    counts = [(item["helpful"], item["harmful"]) for item in report["library"]["items"]]
    assert sum(helpful + harmful for helpful, harmful in counts) > 0
    assert sum(helpful for helpful, _ in counts) > sum(harmful for _, harmful in counts)


def test_every_item_has_a_measured_worth(finished) -> None:
    report, _ = finished
    for item in report["library"]["items"]:
        assert item["worth"]["num_questions"] == 10
        low, high = item["worth"]["interval_95"]
        assert -1 <= low <= item["worth"]["difference"] <= high <= 1


def test_the_manifest_names_model_library_and_accuracy(finished) -> None:
    report, run = finished
    manifest = json.loads((run.path / "experience" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["base_model"] == "student"
    assert manifest["library_sha256"] == read_library(run.path / "experience").sha256 == report["library"]["sha256"]
    assert manifest["accuracy"] == report["accuracy"]


def test_arms_are_compared_at_equal_length_on_the_same_questions(finished) -> None:
    report, _ = finished
    arms = {arm["name"]: arm for arm in report["accuracy"]}
    assert set(arms) == {"nothing", "library", "placebo", "tips"}
    assert {arm["num_questions"] for arm in arms.values()} == {40}
    assert abs(arms["placebo"]["num_tokens"] - arms["library"]["num_tokens"]) <= 2
    assert arms["tips"]["num_tokens"] <= arms["library"]["num_tokens"]
    for arm in arms.values():
        low, high = arm["accuracy_interval_95"]
        assert low <= arm["accuracy"] <= high


def test_the_page_stands_alone(finished) -> None:
    _, run = finished
    page = run.report_path("html").read_text(encoding="utf-8")
    assert len(page.encode()) < MAX_BYTES
    assert page.count("<svg") == 3
    assert not re.search(r"(src|href)=|@import|url\(|<script|https?://", page)


def test_the_cost_stands_beside_the_papers_claim_at_the_prices_in_use(tmp_path: Path) -> None:
    prices = {"input_usd_per_million": 0.5, "output_usd_per_million": 2.0}
    report, run = run_in_process(
        tmp_path,
        Service(WORLD),
        num_train=50,
        num_test=0,
        student={"price": prices},
        gate={"share": 0.6},
    )
    spent = report["money"]["training"]
    by_hand = (spent["prompt_tokens"] * 0.5) / 1e6  # The student's and the teacher's calls have prices of their own.
    assert 0.0 < spent["cost_usd"] < by_hand + spent["completion_tokens"] * 2.0 / 1e6
    for suffix in ("md", "html"):
        text = run.report_path(suffix).read_text(encoding="utf-8")
        assert "arXiv 2510.08191" in text
        assert "$18" in text
        assert f"{38 * 0.5 + 6.6 * 2.0:.2f}" in text, "the paper's tokens at this run's prices"


def test_the_report_says_what_its_bound_is_a_bound_of(tmp_path: Path, finished) -> None:
    _, by_betting = finished
    assert "test by betting" in by_betting.report_path("md").read_text(encoding="utf-8")
    report, by_sign = run_in_process(tmp_path, Service(WORLD), num_train=80, num_test=0, gate={"share": 0.6})
    tests = [step["gate"] for step in report["steps"] if step["gate"]]
    assert {each["test"] for each in tests} == {"sign"}
    assert all(each["accepted"] == (each["lower_bound"] > 0) for each in tests)
    for suffix in ("md", "html"):
        text = by_sign.report_path(suffix).read_text(encoding="utf-8")
        assert "sign test accepts" in text
        assert f"{tests[0]['alpha']:.4f}" in text


def test_a_huge_report_still_fits_and_says_what_it_leaves_out(finished) -> None:
    report, _ = finished
    item = report["library"]["items"][0]
    items = [{**item, "text": f"{number} " + "word " * 40} for number in range(3000)]
    page = render_html({**report, "library": {**report["library"], "items": items}})
    assert len(page.encode()) < MAX_BYTES
    assert "2800 more items stand in experience/library.yaml" in page


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 1.0, ["0.00", "0.20", "0.40", "0.60", "0.80", "1.00"]),
        (-0.27, 0.34, ["-0.20", "0.00", "0.20"]),
        (0.0, 0.0, ["0.00"]),
    ],
)
def test_axes_have_round_values_with_zero_among_them(low: float, high: float, labels: list[str]) -> None:
    found = re.findall(r'class="soft">([-.0-9]+)<', bars([("one", 0.0, (low, high))], low, high))
    assert found == labels


def test_text_from_models_cannot_become_markup(finished) -> None:
    report, _ = finished
    item = {**report["library"]["items"][0], "name": "<script>alert(1)</script>", "text": '"><img src=x>'}
    page = render_html({**report, "name": "<b>", "library": {**report["library"], "items": [item]}})
    assert "<script" not in page
    assert "<img" not in page
    assert "<b>" not in page


def test_a_placebo_has_the_same_length_and_number_of_items() -> None:
    for count in (1, 3, 20):
        items = tuple(Experience(name=f"Name {n}", text="Some words of a lesson. " * (1 + n % 3)) for n in range(count))
        library = ExperienceLibrary(items=items)
        placebo = placebo_of(library)
        assert len(placebo.items) == count
        assert abs(placebo.num_tokens_estimate - library.num_tokens_estimate) <= count + 1


def test_questions_without_a_reward_are_not_counted() -> None:
    arm = Arm(name="x", rewards=(1.0, None, 0.0, 1.0), num_items=0, num_tokens=0).to_json(None)
    assert (arm["num_questions"], arm["num_without_reward"]) == (3, 1)
    assert arm["accuracy"] == pytest.approx(2 / 3)


class TestCommands:
    def test_show_prints_what_stands_in_the_prompt(self, finished, capsys: pytest.CaptureFixture[str]) -> None:
        _, run = finished
        library = read_library(run.path / "experience")
        assert gym(["experience", "show", str(run.path)]) == 0
        assert capsys.readouterr().out == library.render() + "\n"
        assert gym(["experience", "show", str(run.path / "experience"), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert [item["id"] for item in shown["items"]] == [item.id for item in library.items]

    def test_merge_keeps_the_first_and_adds_what_is_new(
        self, finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _, run = finished
        mine = Experience(name="By hand", text="Check the sign.")
        write_library(ExperienceLibrary(items=(mine,), placement="user"), tmp_path / "mine.yaml")
        command = ["experience", "merge", str(tmp_path / "mine.yaml"), str(run.path), "-o", str(tmp_path / "out.yaml")]
        assert gym(command) == 0
        merged = read_library(tmp_path / "out.yaml")
        assert merged.items == (mine, *read_library(run.path / "experience").items)
        assert merged.placement == "user"
        capsys.readouterr()
        assert gym(command) == 2
        assert "exists" in capsys.readouterr().err

    def test_restore_lists_versions_and_brings_one_back(self, finished, capsys: pytest.CaptureFixture[str]) -> None:
        _, run = finished
        latest = read_library(run.path / "experience")
        assert gym(["experience", "restore", str(run.path)]) == 0
        listed = capsys.readouterr().out.splitlines()
        assert listed[0].startswith("0\t0 items")
        assert gym(["experience", "restore", str(run.path), "0"]) == 0
        assert read_library(run.path / "experience").items == ()
        assert gym(["experience", "restore", str(run.path), str(len(listed) - 1)]) == 0
        assert read_library(run.path / "experience") == latest
        assert gym(["experience", "restore", str(run.path), "99"]) == 2

    def test_replay_says_same_and_finds_a_change(self, finished, capsys: pytest.CaptureFixture[str]) -> None:
        _, run = finished
        assert gym(["experience", "replay", str(run.path)]) == 0
        assert {line.split("\t")[0] for line in capsys.readouterr().out.splitlines()} == {"same"}
        page = run.report_path("md")
        page.write_text(page.read_text(encoding="utf-8") + "edited", encoding="utf-8")
        assert gym(["experience", "replay", str(run.path)]) == 1
        assert "changed\treport.md" in capsys.readouterr().out

    def test_a_path_without_a_library_is_one_message(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert gym(["experience", "show", str(tmp_path / "nothing")]) == 2
        assert "there is no such experience library" in capsys.readouterr().err
        assert gym(["experience", "restore", str(tmp_path)]) == 2


def test_a_library_edited_by_hand_starts_a_new_run_and_is_measured(tmp_path: Path, finished) -> None:
    _, run = finished
    library = read_library(run.path / "experience")
    edited = tmp_path / "edited.yaml"
    text = library.to_yaml().replace(library.items[0].text, "Always halve the total.")
    edited.write_text(text.replace(library.items[0].name, "General care"), encoding="utf-8")
    report, second = run_in_process(
        tmp_path,
        Service(WORLD),
        num_train=50,
        num_test=40,
        gate={"share": 0.6},
        library={"initial": str(edited)},
        report={"worth_questions": 0, "baselines": []},
    )
    arms = {arm["name"]: arm["accuracy"] for arm in report["accuracy"]}
    assert arms["initial library"] < arms["nothing"], "halving ruins every answer"
    first = read_library(second.path / "experience" / "versions" / "0000.yaml")
    assert first.items[0].text == "Always halve the total."
    provenance = json.loads((second.path / "experience" / "provenance.json").read_text(encoding="utf-8"))
    by_hand = [record for record in provenance["items"].values() if record["first_step"] is None]
    assert by_hand, "items that no step proposed are told apart"


def test_pruning_takes_a_harmful_item_out_of_a_library_written_by_hand(tmp_path: Path) -> None:
    oracle = [Experience(name=name, text=text) for name, text in WORLD.oracle()]
    harmful = Experience(name="Care", text="Always halve the total before answering.")
    write_library(ExperienceLibrary(items=(*oracle[:6], harmful, *oracle[6:])), tmp_path / "hand.yaml")
    report, run = run_in_process(
        tmp_path,
        Service(WORLD),
        num_train=120,
        num_test=0,
        group_size=1,
        batch_size=5,
        epochs=1,
        budget={"training": {"calls": 3000}},
        gate={"share": 0.8},
        library={"initial": str(tmp_path / "hand.yaml")},
        pruning={"enabled": True, "questions": 20},
        report={"worth_questions": 0},
    )
    pruning = report["steps"][-1]
    assert pruning["kind"] == "pruning"
    assert harmful.id in [operation["target"] for operation in pruning["applied"]]
    assert pruning["accepted"]
    assert harmful not in read_library(run.path / "experience").items
