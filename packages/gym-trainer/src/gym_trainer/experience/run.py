"""One run of training-free GRPO, from specification to artifact, on one page.

Everything that can be wrong is found before the first call is paid for. Every call is journaled, so that a run that was
killed goes on where it stood, and a finished one replays without a network.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from gym_data.experience import (
    FORMAT,
    LIBRARY_FILE,
    MANIFEST_FILE,
    PROVENANCE_FILE,
    VERSIONS_FOLDER,
    ExperienceLibrary,
    read_library,
    write_library,
)
from gym_sdk.errors import SpecError, Where
from gym_sdk.events import RunState
from gym_sdk.rundir import RunDir
from gym_sdk.spec import RunSpec, TrainingFreeGrpo, dump_yaml, sha256
from gym_trainer.experience.budget import Budget
from gym_trainer.experience.caller import Caller
from gym_trainer.experience.checks import check_before_paying, check_references, plan_calls
from gym_trainer.experience.client import ChatEndpoint
from gym_trainer.experience.critique import Tally, Teacher
from gym_trainer.experience.evaluation import Arm, Evaluator, placebo_of
from gym_trainer.experience.html import render_html
from gym_trainer.experience.journal import Journal
from gym_trainer.experience.limits import Sleep
from gym_trainer.experience.loop import Optimiser, StepRecord
from gym_trainer.experience.questions import Splits, load_splits
from gym_trainer.experience.report import Findings, build_report, markdown, write_json
from gym_trainer.experience.rollouts import Scorer, Student
from gym_trainer.narrator import Narrator, recording
from gym_trainer.rewards import build_reward

EXPERIENCE_FOLDER = "experience"
JOURNAL_FILE = "journal.jsonl"
RESULTS = (
    "report.json",
    "report.md",
    "report.html",
    f"{EXPERIENCE_FOLDER}/{LIBRARY_FILE}",
    f"{EXPERIENCE_FOLDER}/{PROVENANCE_FILE}",
    f"{EXPERIENCE_FOLDER}/{MANIFEST_FILE}",
)
"""What a run writes at its end, and a replay writes again with the same bytes."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """How endpoints are reached; tests put a transport of their own here."""

    transport: httpx.AsyncBaseTransport | None = None
    sleep: Sleep = asyncio.sleep


def train_experience(
    spec: RunSpec, run: RunDir, *, replay: bool = False, quiet: bool = True, network: Network = Network()
) -> dict[str, Any]:
    """Run or resume training-free GRPO in a run directory; returns the report's figures.

    A run directory with a journal is resumed: whatever was answered is not asked again. With `replay` nothing is asked
    at all, and nothing but the results is written. Without `quiet` the run tells its story on standard error. Raises
    UserError (before any call is paid for) and RunFailed.
    """
    if not isinstance(spec.method, TrainingFreeGrpo):
        raise SpecError(f"is {spec.method.kind}", where=Where(path="method.kind"), hint="training_free_grpo")
    if replay:
        return asyncio.run(_run(spec, spec.method, run, None, replay=True, network=network))
    with recording(run, quiet=quiet) as told:
        told.state(RunState.PREPARING)
        report = asyncio.run(_run(spec, spec.method, run, told, replay=False, network=network))
        told.state(RunState.SUCCEEDED)
    return report


async def _run(
    spec: RunSpec,
    method: TrainingFreeGrpo,
    run: RunDir,
    told: Narrator | None,
    *,
    replay: bool,
    network: Network,
) -> dict[str, Any]:
    initial = _initial_library(method)
    splits = load_splits(spec, method)
    reward = build_reward(method.reward)
    endpoints = _endpoints(spec, method, replay=replay, network=network)
    try:
        check_references(reward, splits, method)
        check_before_paying(method, splits)
        if not replay:
            for endpoint in {id(each): each for each in endpoints.values()}.values():
                await endpoint.check()
        journal = Journal(run.path / JOURNAL_FILE, read_only=replay)
        budget = Budget(method.budget)
        caller = Caller(journal=journal, budget=budget, endpoints=endpoints, seed=spec.seed, replay=replay)
        try:
            if told is not None:
                _write_inputs(spec, run, splits, method)
            student = Student(
                caller=caller, scorer=Scorer(reward, caller, replay=replay), ground_truth=method.ground_truth
            )
            findings = await _improve_and_measure(
                spec, method, run, told, splits=splits, initial=initial, student=student, caller=caller
            )
        finally:
            await caller.close()
    finally:
        reward.close()
    report = build_report(findings)
    _write_results(spec, run, findings, report, told)
    return report


async def _improve_and_measure(
    spec: RunSpec,
    method: TrainingFreeGrpo,
    run: RunDir,
    told: Narrator | None,
    *,
    splits: Splits,
    initial: ExperienceLibrary,
    student: Student,
    caller: Caller,
) -> Findings:
    """Accuracy before, the loop, accuracy after beside the baselines, and what each item is worth."""
    tally = Tally()
    teacher = Teacher(caller=caller, method=method, tally=tally)
    narrator = _Story(told, caller)
    evaluator = Evaluator(
        method=method,
        student=student,
        teacher=teacher,
        test=splits.test,
        seed=spec.seed,
        on_progress=narrator.progress,
    )
    optimiser = Optimiser(
        method=method,
        splits=splits,
        library=initial,
        student=student,
        teacher=teacher,
        caller=caller,
        seed=spec.seed,
        tally=tally,
        on_step=narrator.step,
        on_progress=narrator.progress,
    )
    arms: list[Arm] = []
    not_measured: list[str] = []
    worths = None

    async def measure(name: str, library: ExperienceLibrary | None) -> None:
        arm = None if library is None else await evaluator.arm(name, library)
        if arm is None:
            not_measured.append(name)
        else:
            arms.append(arm)
            narrator.accuracy(arm)

    if splits.test:
        narrator.state(RunState.EVALUATING)
        await measure("nothing", ExperienceLibrary())
        if initial.items:
            await measure("initial library", initial)
    narrator.state(RunState.TRAINING)
    library = await optimiser.run()
    _write_versions(run, optimiser.versions)
    if splits.test and library.items:
        narrator.state(RunState.EVALUATING)
        await measure("library", library)
        if "placebo" in method.report.baselines:
            await measure("placebo", placebo_of(library))
        if "tips" in method.report.baselines:
            await measure("tips", await evaluator.tips(library, splits.train))
        if method.report.worth_questions:
            worths = await evaluator.worths(library)
            not_measured += [] if worths is not None else ["worth of each item"]
    await caller.settle_failures()
    return Findings(
        spec=spec,
        method=method,
        splits=splits,
        optimiser=optimiser,
        budget=caller.budget,
        arms=arms,
        worths=worths,
        not_measured=not_measured,
        models={role: caller.model(role) for role in ("student", "teacher")},
    )


def _initial_library(method: TrainingFreeGrpo) -> ExperienceLibrary:
    if method.library.initial is None:
        return ExperienceLibrary(placement=method.library.placement)
    return read_library(method.library.initial)


def _endpoints(spec: RunSpec, method: TrainingFreeGrpo, *, replay: bool, network: Network) -> dict[str, ChatEndpoint]:
    """Student and teacher. One endpoint in both roles is one queue, so that its limits hold for both together."""

    def build(role: str) -> ChatEndpoint:
        endpoint = method.student if role == "student" or method.teacher is None else method.teacher
        return ChatEndpoint(
            endpoint,
            role=role,
            model=endpoint.model or spec.model.source,
            offline=replay,
            transport=network.transport,
            sleep=network.sleep,
        )

    student = build("student")
    return {"student": student, "teacher": student if method.teacher is None else build("teacher")}


def _write_inputs(spec: RunSpec, run: RunDir, splits: Splits, method: TrainingFreeGrpo) -> None:
    run.spec_path.write_text(dump_yaml(spec), encoding="utf-8")
    plan = plan_calls(method, splits)
    run.plan_path.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    ids = {name: [question.id for question in getattr(splits, name)] for name in ("train", "gate", "test")}
    run.data_dir.mkdir(exist_ok=True)
    (run.data_dir / "questions.json").write_text(json.dumps(ids, indent=1) + "\n", encoding="utf-8")


def _write_versions(run: RunDir, versions: Iterable[ExperienceLibrary]) -> None:
    folder = run.path / EXPERIENCE_FOLDER / VERSIONS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for number, library in enumerate(versions):
        write_library(library, folder / f"{number:04d}.yaml")


def _write_results(
    spec: RunSpec, run: RunDir, findings: Findings, report: dict[str, Any], told: Narrator | None
) -> None:
    library = findings.optimiser.library
    folder = run.path / EXPERIENCE_FOLDER
    worth = {each.item_id: each.to_json() for each in findings.worths or ()}
    provenance = {
        "format": FORMAT,
        "items": findings.optimiser.provenance.to_json(library, worth),
        "steps": report["steps"],
    }
    manifest = {
        "format": FORMAT,
        "base_model": spec.model.source,
        "library_sha256": library.sha256,
        "num_items": len(library.items),
        "placement": library.placement,
        "spec_sha256": sha256(spec),
        "accuracy": report["accuracy"],
        "gym_trainer": version("gym-trainer"),
    }
    _write(folder / PROVENANCE_FILE, json.dumps(provenance, indent=1, ensure_ascii=False) + "\n")
    _write(folder / MANIFEST_FILE, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    write_library(library, folder / LIBRARY_FILE)
    _write(run.report_path("json"), write_json(report))
    _write(run.report_path("md"), markdown(report))
    _write(run.report_path("html"), render_html(report))
    if told is not None:
        size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        told.events.artifact("experiences", EXPERIENCE_FOLDER, size_bytes)
        told.events.artifact("report", "report.html", run.report_path("html").stat().st_size)


def _write(path: Path, text: str) -> None:
    """Whole or not at all, with the same bytes on every system."""
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_bytes(text.encode())
    draft.replace(path)


class _Story:
    """Turns what happens into events and lines for people; silent in a replay."""

    INTERVAL_S = 1.0

    def __init__(self, told: Narrator | None, caller: Caller) -> None:
        self._told, self._caller = told, caller
        self._last_s = -self.INTERVAL_S

    def state(self, state: RunState) -> None:
        if self._told is not None:
            self._told.state(state)

    def progress(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if self._told is None or (done < total and now - self._last_s < self.INTERVAL_S):
            return
        self._last_s = now
        self._told.events.progress(stage, done, total, "steps" if stage == "train" else "questions")

    def step(self, record: StepRecord) -> None:
        if self._told is None:
            return
        values: dict[str, float] = {
            "groups_kept": record.num_groups_kept,
            "operations_applied": len(record.applied),
            "accepted": float(record.accepted),
            "library_items": record.num_items,
            "library_tokens": record.num_tokens,
        }
        if record.mean_reward is not None:
            values["mean_reward"] = record.mean_reward
        if record.gate is not None:
            values |= {f"gate_{name}": record.gate[name] for name in ("mean_difference", "lower_bound", "alpha")}
        self._told.events.metric(record.step, values | self._spent())
        spent = self._caller.budget.spent["training"]
        reward = "" if record.mean_reward is None else f"mean reward {record.mean_reward:.3f}, "
        verdict = "accepted" if record.accepted else "not accepted"
        tested = "" if record.gate is None else f", gate {record.gate['mean_difference']:+.3f}, {verdict}"
        self._told.say(
            f"step {record.step}: {reward}{record.num_groups_kept} of {record.num_questions} groups with a contrast, "
            f"{len(record.applied)} operations{tested}; library {record.num_items} items; "
            f"{spent.calls} calls, ${spent.cost_usd:.4f}"
        )

    def accuracy(self, arm: Arm) -> None:
        if self._told is not None and arm.known:
            accuracy = sum(arm.known) / len(arm.known)
            self._told.log("info", f"accuracy with {arm.name}: {accuracy:.3f} on {len(arm.known)} questions")

    def _spent(self) -> dict[str, float]:
        return {
            f"{purpose}_{name}": value
            for purpose, spent in self._caller.budget.spent.items()
            for name, value in (
                ("cost_usd", spent.cost_usd),
                ("calls", spent.calls),
                ("tokens", spent.prompt_tokens + spent.completion_tokens),
            )
        }
