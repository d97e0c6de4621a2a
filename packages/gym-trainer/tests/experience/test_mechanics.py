"""Guards what happens between Gym and an endpoint: a server process on loopback, faults, caps, kills, replay."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness import world_spec
from loopback import HERE, WORLD, no_wait, served, train

from gym_sdk.errors import GymError, RunFailed, UserError
from gym_sdk.events import MetricEvent, RunState, read_events
from gym_sdk.rundir import RunDir
from gym_sdk.spec import RunSpec, dump_yaml
from gym_trainer.experience.caller import ReplayMiss
from gym_trainer.experience.run import RESULTS, Network, train_experience

PRICE = {"input_usd_per_million": 1.0, "output_usd_per_million": 4.0}


def small(tmp_path: Path, url: str, **method: Any) -> RunSpec:
    """20 training questions in two batches, 30 for a gate that lets nearly everything pass, 20 test questions."""
    defaults: dict[str, Any] = {
        "num_train": 50,
        "num_test": 20,
        "batch_size": 10,
        "gate": {"share": 0.6, "delta": 0.4, "trial_attempts": 2},
        "report": {"worth_questions": 0},
    }
    return world_spec(tmp_path, WORLD, base_url=url, **{**defaults, **method})


def results(run: RunDir, names: tuple[str, ...] = RESULTS) -> dict[str, bytes]:
    return {name: (run.path / name).read_bytes() for name in names}


def total(report: dict[str, Any], name: str) -> int:
    return sum(report["money"][purpose][name] for purpose in ("training", "evaluation"))


def library_of(run: RunDir) -> bytes:
    return (run.path / "experience" / "library.yaml").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], RunDir, list[dict[str, Any]]]:
    """The run that all faults are measured against."""
    tmp_path = tmp_path_factory.mktemp("undisturbed")
    with served(tmp_path) as (url, asked, _):
        report, run = train(small(tmp_path, url))
        return report, run, asked()


def test_a_run_over_a_real_socket_learns_and_leaves_its_artifacts(undisturbed) -> None:
    report, run, asked = undisturbed
    assert run.state() is RunState.SUCCEEDED
    assert {arm["name"] for arm in report["accuracy"]} >= {"nothing"}
    steps = [event for event in read_events(run.events_path) if isinstance(event, MetricEvent)]
    assert [event.step for event in steps] == [1, 2]
    assert steps[-1].values["training_calls"] == report["money"]["training"]["calls"]
    assert len(asked) == total(report, "calls")
    assert report["library"]["items"], "the runs below are compared by their libraries, which must not be empty"
    assert sorted(path.name for path in (run.path / "experience").iterdir()) == [
        "library.yaml",
        "manifest.json",
        "provenance.json",
        "versions",
    ]
    assert run.report_path("html").stat().st_size < 300_000


def test_groups_whose_attempts_are_alike_cost_no_teacher_call(undisturbed) -> None:
    report, _, asked = undisturbed
    kept = sum(step["num_groups_kept"] for step in report["steps"])
    assert 0 < kept < 20
    assert report["did_not_work_out"]["groups skipped: all attempts alike"] == 20 - kept
    teacher = sum(request["model"] == "teacher" for request in asked)
    consolidations = len(report["steps"])
    tips = any(arm["name"] == "tips" for arm in report["accuracy"])
    assert teacher == kept + consolidations + tips


@pytest.mark.parametrize(
    ("actions", "headers"),
    [
        ([429, 429, 503], {"retry-after": "7"}),
        ([500, "garbage", "close", 529], {}),
        (["hang", "ok", "hang"], {}),
    ],
    ids=["limits", "failures", "hangs"],
)
def test_a_struggling_endpoint_changes_nothing_but_the_number_of_calls(
    tmp_path: Path, undisturbed, actions: list[Any], headers: dict[str, str]
) -> None:
    clean, clean_run, _ = undisturbed
    plan = {"student": actions * 2, "teacher": actions}
    with served(tmp_path, plan=plan, headers=headers) as (url, asked, _):
        limits = (
            {"base_url": url, "timeout_s": 1.0, "timeout_per_token_s": 0.0} if "hang" in actions else {"base_url": url}
        )
        spec = small(tmp_path, url, student={"model": "student", **limits}, teacher={"model": "teacher", **limits})
        report, run = train(spec)
        assert Counter(r["action"] for r in asked())["ok"] == total(clean, "answers")
    assert library_of(run) == library_of(clean_run)
    assert report["accuracy"] == clean["accuracy"], "a failed call is never a reward of 0"
    faults = sum(action != "ok" for action in [*actions, *actions, *actions])
    calls = {
        name: sum(r["money"][p]["calls"] for p in ("training", "evaluation"))
        for name, r in (("now", report), ("clean", clean))
    }
    assert calls["now"] == calls["clean"] + faults
    lost = sum(report["money"][purpose]["lost_calls"] for purpose in ("training", "evaluation"))
    assert lost == sum(action in ("hang", "garbage", "close") for action in [*actions, *actions, *actions])


def test_retry_after_is_waited_for(tmp_path: Path) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await asyncio.sleep(0)

    with served(tmp_path, plan={"student": [429]}, headers={"retry-after": "7"}) as (url, *_):
        spec = small(tmp_path, url)
        train_experience(spec, RunDir.create(spec.output.dir, "wait"), network=Network(sleep=sleep))
    assert waits == [7.0]


def test_a_call_that_keeps_failing_is_dropped_and_counted_never_scored(tmp_path: Path) -> None:
    with served(tmp_path, plan={"student": [400, 422]}) as (url, *_):
        report, _ = train(small(tmp_path, url))
    nothing = report["accuracy"][0]
    assert nothing["num_without_reward"] == 2
    assert nothing["num_questions"] == 18


def test_an_endpoint_that_goes_down_stops_the_run_and_resuming_finishes_it(tmp_path: Path, undisturbed) -> None:
    _, clean_run, _ = undisturbed
    with served(tmp_path, plan={"student": ["ok"] * 70 + [500] * 10_000}) as (url, *_):
        spec = small(tmp_path, url)
        run = RunDir.create(spec.output.dir, spec.name)
        with pytest.raises(RunFailed, match=r"failed \d+ calls in a row"):
            train_experience(spec, run, network=Network(sleep=no_wait))
        assert run.state() is RunState.FAILED
    with served(tmp_path) as (url, *_):
        train_experience(small(tmp_path, url), run, network=Network(sleep=no_wait))
    assert run.state() is RunState.SUCCEEDED
    assert library_of(run) == library_of(clean_run)


def test_malformed_answers_get_one_repair_and_are_then_dropped_in_sight(tmp_path: Path) -> None:
    with served(tmp_path, faults={"malformed": 1.0}) as (url, asked, _):
        report, run = train(small(tmp_path, url))
        teacher = sum(request["model"] == "teacher" for request in asked())
    counts = report["did_not_work_out"]
    assert counts["teacher answers sent back for repair"] == counts["teacher answers dropped: malformed after repair"]
    assert teacher == 2 * counts["teacher answers sent back for repair"] > 0
    assert b"experiences: []" in library_of(run)
    assert "malformed after repair" in run.report_path("md").read_text(encoding="utf-8")


def test_a_repaired_answer_counts(tmp_path: Path) -> None:
    with served(tmp_path, faults={"malformed": 0.5}) as (url, *_):
        report, _ = train(small(tmp_path, url))
    counts = report["did_not_work_out"]
    repaired = counts["teacher answers sent back for repair"]
    assert 0 < counts["teacher answers dropped: malformed after repair"] < repaired
    assert sum(step["num_proposals"] for step in report["steps"]) > 0


@pytest.mark.parametrize(
    "cap", [{"calls": 150}, {"tokens": 25_000}, {"cost_usd": 0.03}], ids=["calls", "tokens", "cost"]
)
def test_no_cap_is_ever_passed_and_what_was_accepted_is_measured(tmp_path: Path, cap: dict[str, float]) -> None:
    with served(tmp_path) as (url, asked, _):
        endpoint = {"base_url": url, "price": PRICE}
        spec = small(
            tmp_path,
            url,
            student={**endpoint, "model": "student"},
            teacher={**endpoint, "model": "teacher"},
            budget={"training": cap},
        )
        report, run = train(spec)
        before = len(asked())
        again = train_experience(spec, run, network=Network(sleep=no_wait))
        assert len(asked()) == before, "the same cap stops a resumed run at the same place"
    assert again == report
    spent = report["money"]["training"]
    ((name, limit),) = cap.items()
    used = {
        "calls": spent["calls"],
        "tokens": spent["prompt_tokens"] + spent["completion_tokens"] + spent["lost_tokens"],
        "cost_usd": spent["cost_usd"] + spent["lost_usd"],
    }[name]
    assert 0.5 * limit < used <= limit
    assert report["stopped_by"].startswith(name)
    assert report["accuracy"][0]["name"] == "nothing"


def test_time_is_capped_even_while_an_endpoint_hangs(tmp_path: Path) -> None:
    with served(tmp_path, plan={"teacher": ["hang"] * 1000}) as (url, *_):
        report, _ = train(small(tmp_path, url, budget={"training": {"seconds": 3.0}}))
    assert report["stopped_by"].startswith("seconds")
    assert 3.0 <= report["money"]["training"]["busy_s"] < 6.0
    assert report["money"]["training"]["lost_calls"] > 0


def test_a_raised_cap_lets_a_stopped_run_go_on_to_the_same_end(tmp_path: Path, undisturbed) -> None:
    _, clean_run, _ = undisturbed
    with served(tmp_path) as (url, asked, _):
        spec = small(tmp_path, url, budget={"training": {"calls": 150}})
        run = RunDir.create(spec.output.dir, spec.name)
        train_experience(spec, run, network=Network(sleep=no_wait))
        train_experience(small(tmp_path, url), run, network=Network(sleep=no_wait))
        bodies = Counter(request["body"] for request in asked())
    assert max(bodies.values()) == 1, "nothing is paid twice"
    assert library_of(run) == library_of(clean_run)


def test_a_run_out_of_evaluation_budget_says_what_was_not_measured(tmp_path: Path, undisturbed) -> None:
    clean, _, _ = undisturbed
    if not clean["library"]["items"]:
        pytest.skip("this world's run accepts nothing")
    with served(tmp_path) as (url, *_):
        report, _ = train(small(tmp_path, url, budget={"evaluation": {"calls": 45}}))
    assert [arm["name"] for arm in report["accuracy"]] == ["nothing", "library"]
    assert report["not_measured"] == ["placebo", "tips"]
    assert report["money"]["evaluation"]["calls"] <= 45


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("after", [10, 90, 200], ids=["evaluating", "attempts", "gate"])
def test_a_killed_run_resumes_to_the_same_bytes_without_paying_twice(tmp_path: Path, undisturbed, after: int) -> None:
    _, clean_run, _ = undisturbed
    with served(tmp_path, jitter_s=0.01, say_at=after) as (url, asked, heard):
        spec = small(tmp_path, url)
        run = RunDir.create(spec.output.dir, spec.name)
        (tmp_path / "spec.yaml").write_text(dump_yaml(spec), encoding="utf-8")
        process = subprocess.Popen([sys.executable, str(HERE / "train_script.py"), tmp_path / "spec.yaml", run.path])
        assert heard() == f"{after} requests"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        with (run.path / "journal.jsonl").open("ab") as journal:
            journal.write(b'{"type":"answer","key":"torn')
        entries = [json.loads(line) for line in (run.path / "journal.jsonl").read_bytes().splitlines()[:-1]]
        answered = {entry["key"] for entry in entries if entry["type"] == "answer"}
        paid = {_digest(e["body"]) for e in entries if e["type"] == "request" and e["key"] in answered and "body" in e}
        before = len(asked())
        train_experience(spec, run)
        again = {request["body"] for request in asked()[before:]}
    assert answered
    assert not paid & again, "an answered request was paid for a second time"
    # Test rewards and library are those of a run without a kill; only what was under way may have been lost.
    assert library_of(run) == library_of(clean_run)
    now, clean = (json.loads((r.path / "report.json").read_text(encoding="utf-8")) for r in (run, clean_run))
    assert now["accuracy"] == clean["accuracy"]
    assert now["steps"] == clean["steps"]
    assert now["money"]["training"]["answers"] == clean["money"]["training"]["answers"]


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def test_a_finished_run_replays_bit_for_bit_without_a_network(tmp_path: Path) -> None:
    with served(tmp_path, plan={"student": [500, 400, "close"], "teacher": [500]}) as (url, *_):
        spec = small(tmp_path, url)
        report, run = train(spec)
    before = results(run)
    for name in RESULTS:
        (run.path / name).unlink()
    journal = (run.path / "journal.jsonl").read_bytes()
    assert train_experience(spec, run, replay=True) == report
    assert results(run) == before
    assert (run.path / "journal.jsonl").read_bytes() == journal


def test_a_replay_of_something_else_says_so(tmp_path: Path, undisturbed) -> None:
    _, clean_run, _ = undisturbed
    other = small(tmp_path, "http://127.0.0.1:1/v1", group_size=6)
    run = RunDir.create(other.output.dir, other.name)
    (run.path / "journal.jsonl").write_bytes((clean_run.path / "journal.jsonl").read_bytes())
    with pytest.raises(ReplayMiss, match="holds no answer"):
        train_experience(other, run, replay=True)


def test_the_order_of_answers_has_no_effect(tmp_path: Path, undisturbed) -> None:
    clean, clean_run, _ = undisturbed
    with served(tmp_path, jitter_s=0.02) as (url, *_):
        endpoint = {"base_url": url, "max_concurrency": 37}
        spec = small(tmp_path, url, student={**endpoint, "model": "student"}, teacher={**endpoint, "model": "teacher"})
        report, run = train(spec)
    assert library_of(run) == library_of(clean_run)
    assert report["steps"] == clean["steps"]


def test_a_damaged_journal_is_named(tmp_path: Path, undisturbed) -> None:
    _, clean_run, _ = undisturbed
    spec = small(tmp_path, "http://127.0.0.1:1/v1")
    run = RunDir.create(spec.output.dir, spec.name)
    lines = (clean_run.path / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (run.path / "journal.jsonl").write_bytes(b"".join([*lines[:5], b"@@@\n", *lines[5:10]]))
    with pytest.raises(UserError, match=r"journal\.jsonl:6: is damaged in the middle"):
        train_experience(spec, run, replay=True)


@pytest.mark.parametrize(
    ("settings", "method", "message"),
    [
        ({"key": "right"}, {}, "asks for a key, and none was sent: Incorrect API key provided"),
        ({"models": ["teacher", "other"]}, {}, "has no model 'student'"),
    ],
    ids=["key", "model"],
)
def test_a_wrong_endpoint_is_one_message_before_money_is_spent(
    tmp_path: Path, settings: dict[str, Any], method: dict[str, Any], message: str
) -> None:
    with served(tmp_path, **settings) as (url, asked, _):
        with pytest.raises(GymError) as caught:
            train(small(tmp_path, url, **method))
        assert asked() == []
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_endpoint_that_is_down_at_start_is_one_message(tmp_path: Path) -> None:
    with served(tmp_path) as (url, *_):
        pass
    with pytest.raises(UserError, match="cannot be reached") as caught:
        train(small(tmp_path, url))
    assert caught.value.exit_code == 2
    assert "gym serve" in str(caught.value)
