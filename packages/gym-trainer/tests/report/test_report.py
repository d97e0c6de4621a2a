"""Guards the report: true to the events, complete in one small file, and safe with whatever data and models write."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gym_data.record import text_message
from gym_data.report import DataReport, Sample, SampleToken
from gym_sdk.events import EventWriter
from gym_sdk.rundir import RunDir
from gym_sdk.spec import dump_yaml, spec_from_data
from gym_trainer.evaluation.json_fields import Question, judge, summarise
from gym_trainer.exporting.card import render_card
from gym_trainer.records import write_json
from gym_trainer.report import write_report
from gym_trainer.report.chart import nice_ticks, running_mean
from gym_trainer.report.collect import MAX_POINTS, collect
from gym_trainer.report.html import MAX_BYTES
from gym_trainer.report.words import plan_rows

HOSTILE = '<script>alert(1)</script> "quoted" | pipe ``` fence'


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that was killed after step 600 and went on from step 500."""
    run = RunDir.create(tmp_path, "notes")
    spec = spec_from_data(
        {
            "name": "notes",
            "model": {"source": "owner/model"},
            "data": {"train": [{"source": "/home/x/secret/rows.jsonl"}]},
        }
    )
    run.spec_path.write_text(dump_yaml(spec))
    with EventWriter(run.events_path) as events:
        events.state("preparing")
        events.state("training")
        for step in range(1, 601):
            events.metric(step, {"loss": 2.0, "num_tokens": 100, "num_trained_tokens": 10, "peak_memory_bytes": 1e9})
        events.state("training")
        for step in range(501, 2001):
            values = {"loss": 1000 / step, "num_tokens": 100, "num_trained_tokens": 10, "grad_norm": 1.0}
            events.metric(step, values | {"rewards/margins": step / 1000})
        events.metric(2000, {"eval_loss": 0.6, "eval_rewards/margins": 1.25})
        events.log("warning", HOSTILE)
        events.state("succeeded")
    question = Question(
        messages=(text_message("user", HOSTILE),), tools_json=None, expected={"a": HOSTILE}, place="r:1"
    )
    for moment, text in (("before", HOSTILE), ("after", json.dumps({"a": HOSTILE}))):
        answers = [judge(question, text, num_tokens=3, ended=True)] * 40
        write_json(run.path / "evaluation" / f"{moment}.json", [summarise("json_fields", answers, 1.0).to_json()])
    data = DataReport(fingerprint="f" * 32, rows_in=40, rows_train=40, tokens=4000, trained_tokens=400)
    data.samples = [Sample("row 1", (SampleToken("<|user|> " + HOSTILE, False), SampleToken(HOSTILE, True)))] * 3
    data.write(run.data_dir)
    return run


def test_steps_that_were_done_twice_count_once_and_the_later_time(run: RunDir) -> None:
    training = collect(run)["training"]
    assert training["num_steps"] == 2000
    assert training["num_tokens"] == 2000 * 100
    assert training["num_resumes"] == 1
    assert training["last_loss"] == 0.5
    assert len(training["series"]["loss"]) == MAX_POINTS
    # Steps 501 to 600 have the values of the second time, about 1.8, not the 2.0 of the first.
    around_550 = [value for step, value in training["series"]["loss"] if 510 < step < 595]
    assert around_550
    assert max(around_550) < 1.97


def test_with_a_price_report_and_card_say_what_the_run_cost(run: RunDir) -> None:
    assert collect(run)["cost"] is None
    spec = run.spec_path.read_text().replace("price_per_hour: null", "price_per_hour: 36000000.0")
    run.spec_path.write_text(spec)
    facts = collect(run)
    assert facts["cost"] > 0
    facts["plan"] = {
        "micro_batch_tokens": 64,
        "run": {"time_s": 60.0, "cost": 2.0},
        "device": "cpu",
        "dtype": "float32",
    }
    assert ("cost", "2.00", f"{facts['cost']:.2f}") in plan_rows(facts)
    assert f"cost {facts['cost']:.2f}, at 3.6e+07 an hour" in render_card(facts, is_adapter=True)


def test_what_the_method_measures_stands_beside_what_held_out_rows_say(run: RunDir) -> None:
    write_report(run)
    measure = json.loads(run.report_path("json").read_text())["training"]["measures"]["rewards/margins"]
    assert (measure["first"], measure["last"], measure["held_out"]) == (0.501, 2.0, 1.25)
    assert "| rewards/margins | 0.501 | 2 | 1.25 |" in run.report_path("md").read_text()
    page = run.report_path("html").read_text()
    assert "<td>rewards/margins</td><td>0.501</td><td>2</td><td>1.25</td>" in page
    assert "Reward margin over steps" in page


def test_the_page_is_one_small_file_that_needs_no_other(run: RunDir) -> None:
    write_report(run)
    page = run.report_path("html").read_text()
    assert len(page.encode()) < MAX_BYTES
    assert not re.findall(r"""(?:src|href)\s*=|@import|url\(|https?://""", page)
    assert "<svg" in page
    assert 'name="viewport"' in page


def test_text_of_data_and_models_is_never_markup(run: RunDir) -> None:
    write_report(run)
    page = run.report_path("html").read_text()
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 6
    markdown = run.report_path("md").read_text()
    for line in markdown.splitlines():
        if line.startswith("| ") and "pipe" in line:
            assert "\\| pipe" in line


def test_the_three_forms_agree_on_the_numbers(run: RunDir) -> None:
    write_report(run)
    facts = json.loads(run.report_path("json").read_text())
    after = facts["evaluation"][0]["after"]["field_accuracy"]
    assert (after["count"], after["total"]) == (40, 40)
    for suffix in ("md", "html"):
        text = run.report_path(suffix).read_text()
        assert "100 %" in text
        assert "91.2" in text  # the lower end of Wilson's interval of 40 in 40


def test_the_card_names_no_path_of_the_machine(run: RunDir) -> None:
    card = render_card(collect(run), is_adapter=True)
    assert "base_model: owner/model" in card
    assert "/home" not in card
    assert "secret" not in card
    assert "rows.jsonl" in card


def test_ticks_are_round_numbers_around_the_values() -> None:
    assert nice_ticks(0, 1.9) == [0, 0.5, 1.0, 1.5, 2.0]
    assert nice_ticks(0, 0) == [0, 0.25, 0.5, 0.75, 1.0]
    ticks = nice_ticks(3e-5, 9e-4)
    assert ticks[0] <= 3e-5
    assert ticks[-1] >= 9e-4


def test_the_smoothed_curve_starts_and_ends_where_the_values_do() -> None:
    points = [(step, float(step % 7)) for step in range(100)]
    smooth = running_mean(points)
    assert smooth[0] == points[0]
    assert smooth[-1] == points[-1]
    assert [x for x, _ in smooth] == [x for x, _ in points]
