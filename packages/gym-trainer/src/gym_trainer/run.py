"""A run, from its specification to its report: the story on one page.

resolve -> prepare -> plan -> evaluate -> fit -> evaluate -> export -> report

Every stage leaves its result in the run's folder, complete or absent, so that a killed run goes on where it was.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_sdk.errors import MissingExtra, UserError, Where
from gym_sdk.events import RunState
from gym_sdk.folders import cache_dir
from gym_sdk.rundir import RunDir
from gym_sdk.spec import RunSpec, dump_yaml, load_spec
from gym_sdk.spec.adapter import is_whole_model
from gym_serve.libraries import grow_memory_in_place, quieten_libraries, wait_without_spinning
from gym_trainer import records
from gym_trainer.narrator import Narrator, recording

if TYPE_CHECKING:
    from gym_data import Prepared, Streamed
    from gym_trainer.evaluation.run import Task
    from gym_trainer.exporting.folder import Base
    from gym_trainer.loop.fit import FitResult
    from gym_trainer.objectives.base import Objective
    from gym_trainer.planning import Plan


def start_run(spec: RunSpec, *, quiet: bool = False) -> RunDir:
    """Carry out what a specification asks for, whatever its method."""
    if spec.method.kind == "training_free_grpo":
        return optimise_context(spec, RunDir.create(spec.output.dir, spec.name), quiet=quiet)
    return train(spec, quiet=quiet)


def train(spec: RunSpec, *, resume: RunDir | None = None, quiet: bool = False) -> RunDir:
    """Carry a training run out, or go on with one, and return its folder. Its state says how it ended.

    Raises:
        UserError: something to change in the input; the run, if it has begun, is marked as failed.
        RunFailed: it began and could not go on.
    """
    require_torch("training")
    check_inputs(spec)
    run = resume or RunDir.create(spec.output.dir, spec.name)
    with recording(run, quiet=quiet) as told:
        run.spec_path.write_text(dump_yaml(spec), encoding="utf-8")
        told.state(RunState.PREPARING)
        base = resolve(spec, told)
        prepared = prepare_data(spec, base, run, told)
        objective, rows = build_objective(spec, base, prepared)
        tasks = load_tasks(spec, base)
        plan = make_plan(spec, objective, base, prepared, run, told)

        model = load(spec, plan, objective, base, told)
        if spec.evaluation.before:
            evaluate("before", tasks, model, base, run, told)
        told.state(RunState.TRAINING)
        trained, fitted = fit(spec, plan, model, objective, base, rows, run, told, resume=resume is not None)
        close_stream(prepared, run)
        if fitted.paused:
            told.state(RunState.PAUSED, f"stopped after step {fitted.num_steps} of {fitted.max_steps}")
            told.say(f"go on with: gym train --resume {run.path}")
            return run
        evaluate("after", tasks, trained.model, base, run, told)
        told.state(RunState.EXPORTING)
        export(spec, trained, base, run, told)
        report(run, objective, told)
        told.state(RunState.SUCCEEDED)
    return run


def resume_run(path: str | Path, *, quiet: bool = False) -> RunDir:
    """Go on with a run that was killed, paused or failed, under the specification that it began with.

    A URL is a run's folder in an `output.mirror`: what is not on this machine is fetched first.

    Raises:
        UserError: there is no such run, it has succeeded already, or its inputs are not what they were.
    """
    run = fetch_run(str(path)) if "://" in str(path) else RunDir.open(path)
    if run.state() is RunState.SUCCEEDED:
        raise UserError(
            "this run has succeeded: there is nothing left to do",
            where=Where(file=str(run.path)),
            hint=f"talk to it: gym chat {run.path}",
        )
    if not run.spec_path.is_file():
        raise UserError("this run ended before it began", where=Where(file=str(run.path)), hint="start a new one")
    spec = load_spec(run.spec_path)
    if spec.method.kind == "training_free_grpo":
        return optimise_context(spec, run, quiet=quiet)
    return train(spec, resume=run, quiet=quiet)


def fetch_run(url: str) -> RunDir:
    """A mirrored run as a folder on this machine, where its specification says; one that is there already is used."""
    require_torch("training")
    from gym_trainer.loop.mirror import open_mirror

    mirror = open_mirror(url)
    with tempfile.TemporaryDirectory(prefix="gym-mirror-") as scratch:
        copy = Path(scratch) / "spec.yaml"
        copy.write_text(mirror.read_text("spec.yaml"), encoding="utf-8")
        spec = load_spec(copy)
    folder = Path(spec.output.dir) / url.rstrip("/").rpartition("/")[2]
    if not (folder / "run.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        mirror.pull_run(folder)
    return RunDir.open(folder)


def optimise_context(spec: RunSpec, run: RunDir, *, quiet: bool) -> RunDir:
    """Training-free: an experience library instead of weights, and no torch. It resumes from its own journal."""
    from gym_trainer.experience.run import train_experience

    train_experience(spec, run, quiet=quiet)
    return run


def require_torch(what: str) -> None:
    """Raise MissingExtra, one line with the install command, where torch is not installed."""
    from importlib.util import find_spec

    if any(find_spec(module) is None for module in ("torch", "transformers", "peft", "accelerate")):
        raise MissingExtra(what, package="gym-trainer", extra="torch")
    wait_without_spinning()
    grow_memory_in_place()
    quieten_libraries()


def check_inputs(spec: RunSpec) -> None:
    """Find what is cheap to find before anything is made: files that are not there, trackers that are not installed."""
    from gym_data.sources import check_exists

    for source in [*spec.data.train, *spec.data.eval.sources, *(task.data for task in spec.evaluation.tasks)]:
        check_exists(source)
    if spec.output.report_to:
        from gym_trainer.loop.fit import check_trackers

        check_trackers(spec.output.report_to)
    from gym_trainer.loop.optimizers import require_optimizer

    require_optimizer(spec.train.optimizer)
    if spec.output.mirror is not None:
        from gym_trainer.loop.mirror import open_mirror

        open_mirror(spec.output.mirror)


def resolve(spec: RunSpec, told: Narrator) -> Base:
    """The base model as a folder on this machine; what is downloaded or converted is said, with its size, before."""
    from gym_serve.models import resolve as resolve_model
    from gym_trainer.exporting.folder import read_base

    with told.stages() as report_progress:
        resolved = resolve_model(spec.model.source, revision=spec.model.revision, on_progress=report_progress)
    return read_base(spec, resolved)


def prepare_data(spec: RunSpec, base: Base, run: RunDir, told: Narrator) -> Prepared | Streamed:
    """Rows to exactly masked tokens, or a stream of them; three are shown. A resumed run must find the data it began
    with, and the date that the chat template was told then."""
    from gym_data import open_stream, prepare
    from gym_trainer.showing import rendered_rows

    method = spec.method
    assert method.kind != "training_free_grpo"
    before = records.read_json(run.data_dir / "report.json")
    moment = (before or {}).get("moment")
    with told.stages() as report_progress:
        prepared = (open_stream if spec.data.streaming else prepare)(
            spec.data,
            base.folder,
            cache_dir=cache_dir(),
            seed=spec.seed,
            objective=method.data_objective,
            now=datetime.fromisoformat(moment) if moment else None,
            on_progress=report_progress,
        )
    report = prepared.report
    if before is not None and before["fingerprint"] != report.fingerprint:
        raise UserError(
            "the data, the tokenizer or the template is not what this run began with",
            where=Where(file=str(run.path)),
            hint="start a new run; to go on from its weights, set adapter.init_from to its adapter",
        )
    report.write(run.data_dir)
    told.say(rendered_rows(report.samples))
    told.say(report.summary())
    return prepared


def build_objective(spec: RunSpec, base: Base, prepared: Prepared | Streamed) -> tuple[Objective, records.Rows]:
    """What is optimised, and over which rows; a method's own inputs are checked before weights load."""
    from gym_data import TokenStore
    from gym_trainer.objectives.base import build

    objective = build(spec, base, prepared)
    return objective, records.Rows(
        train=objective.rows(prepared.train) if isinstance(prepared.train, TokenStore) else prepared.train,
        eval=objective.rows(prepared.eval) if prepared.eval is not None else None,
    )


def load_tasks(spec: RunSpec, base: Base) -> list[Task]:
    """The evaluation tasks, with every mistake in their data found before the model loads."""
    from gym_trainer.evaluation.run import load_tasks as load

    return load(spec, base.renderer)


def make_plan(
    spec: RunSpec, objective: Objective, base: Base, prepared: Prepared | Streamed, run: RunDir, told: Narrator
) -> Plan:
    """What will run, with its memory and time, shown and kept.

    Raises:
        DoesNotFit: it needs more memory than there is; the message says what would fit.
    """
    import torch

    from gym_serve.models import read_config
    from gym_trainer.adapters.before_weights import check_adapter
    from gym_trainer.adapters.prequantized import check_prequantized
    from gym_trainer.fast.host_memory import keep_freed_memory
    from gym_trainer.planning import detect, render
    from gym_trainer.planning import plan as choose
    from gym_trainer.planning.hardware import hold_to
    from gym_trainer.planning.source import shape_of

    config = read_config(base.resolved.folder, trust_remote_code=spec.model.trust_remote_code)
    check_prequantized(config, spec)
    hardware = detect(spec.performance.device, num_threads=spec.performance.num_threads)
    check_adapter(spec, config, hardware.kind, writes_text=objective.scores is None, new_token_ids=base.new_token_ids)
    plan = choose(
        spec,
        config,
        hardware,
        data=shape_of(spec, prepared),
        resident_bytes=objective.resident_bytes,
        compare=False,
    )
    if plan.num_threads is not None:
        torch.set_num_threads(plan.num_threads)
    if plan.device == "cpu":
        keep_freed_memory()
    elif spec.performance.memory_limit_gb is not None:
        hold_to(int(spec.performance.memory_limit_gb * 1e9))
    records.write_text(run.plan_path, plan.to_json())
    told.say(render(plan))
    return plan


def load(spec: RunSpec, plan: Plan, objective: Objective, base: Base, told: Narrator) -> Any:
    """The base model in memory, with a new head where the method scores instead of writing."""
    import torch

    from gym_serve.models import load_model
    from gym_serve.models.adapters import grow_embeddings
    from gym_trainer.exporting.score import set_padding

    told.say(f"loading {base.resolved.source} in {plan.dtype} on {plan.device}")
    torch.manual_seed(spec.seed)  # a new head is the same one when the run is resumed
    model = load_model(
        base.resolved,
        dtype=plan.dtype,
        device=plan.device,
        quantization=spec.model.quantization,
        trust_remote_code=spec.model.trust_remote_code,
        scores=objective.scores,
    )
    if objective.scores is not None:
        set_padding(model, base.tokenizer)
    if base.new_token_ids:
        grow_embeddings(model, max(base.new_token_ids) + 1)
    return model


def evaluate(moment: str, tasks: list[Task], model: Any, base: Base, run: RunDir, told: Narrator) -> None:
    """Real generations for every task, kept under `evaluation/`. What an earlier process finished is not done again."""
    from gym_trainer.evaluation.run import run_tasks
    from gym_trainer.showing import results_line

    path = run.path / "evaluation" / f"{moment}.json"
    if not tasks or path.exists():
        return
    told.state(RunState.EVALUATING, moment)
    total = sum(len(task.questions) for task in tasks)
    with told.progress("evaluate", total, "answers", f"evaluating {moment} training") as bar:
        results = run_tasks(
            tasks, model, base.tokenizer, base.renderer.stop_ids, on_progress=lambda done, _: bar.update(done)
        )
    records.write_json(path, [result.to_json() for result in results])
    for result in results:
        told.say(results_line(result))


def fit(
    spec: RunSpec,
    plan: Plan,
    model: Any,
    objective: Objective,
    base: Base,
    rows: records.Rows,
    run: RunDir,
    told: Narrator,
    *,
    resume: bool,
) -> tuple[records.Trained, FitResult]:
    """Train what the adapter section says, from the newest complete checkpoint of a resumed run."""
    from gym_data.streaming.stream import RowStream
    from gym_trainer.adapters import attach
    from gym_trainer.adapters.first_batches import first_batches
    from gym_trainer.exporting.adapter import trained_weights
    from gym_trainer.exporting.merge import require_own_weights
    from gym_trainer.exporting.probe import probe_ids, probe_logits
    from gym_trainer.loop.fit import FitSettings
    from gym_trainer.loop.fit import fit as run_fit
    from gym_trainer.loop.interrupt import StopRequest

    base_logits = probe_logits(model, probe_ids(base)) if is_whole_model(spec.adapter) else None
    first = None if isinstance(rows.train, RowStream) else partial(first_batches, rows.train, plan.device)
    attached = attach(model, spec.adapter, seed=spec.seed, new_token_ids=base.new_token_ids, first_batches=first)
    if spec.output.merge:
        require_own_weights(attached.model)
    for note in attached.notes:
        told.log("warning", note)
    told.say(f"training {attached.num_trained:,} of {attached.num_weights:,} weights")
    initial = {} if is_whole_model(spec.adapter) else trained_weights(attached.model)
    stopping = "stopping after this step, with a checkpoint; once more to stop at once"
    with (
        StopRequest(lambda: told.say(stopping)) as stop,
        told.progress("train", None, "steps", "training") as bar,
    ):
        fitted = run_fit(
            attached.model,
            spec,
            FitSettings.of(plan),
            objective,
            train_rows=rows.train,
            eval_rows=rows.eval,
            run_path=run.path,
            events=told.events,
            progress=bar,
            stop=stop,
            resume=resume,
        )
    records.write_json(run.path / "fit.json", records.of_fit(fitted, attached))
    records.write_json(run.plan_path, records.with_measured(records.read_json(run.plan_path), fitted))
    return records.Trained(attached.model, initial, base_logits), fitted


def close_stream(prepared: Prepared | Streamed, run: RunDir) -> None:
    """Rows that were read while training are counted only now."""
    from gym_data import Prepared

    if not isinstance(prepared, Prepared):
        prepared.train.close()
        prepared.report.write(run.data_dir)


def export(spec: RunSpec, trained: records.Trained, base: Base, run: RunDir, told: Narrator) -> None:
    """The final artifact in Hugging Face layout, with the template of training, and merged when asked."""
    from gym_trainer.exporting.adapter import keep_beside, save_adapter
    from gym_trainer.exporting.folder import size_bytes
    from gym_trainer.exporting.merge import merge_adapter
    from gym_trainer.exporting.model import save_model

    metadata = records.artifact_metadata(spec, run)

    def keep(kind: str, folder: Path, write: Callable[[], object]) -> None:
        write()
        told.events.artifact(kind, folder.relative_to(run.path).as_posix(), size_bytes(folder))
        told.say(f"wrote {folder}")

    if is_whole_model(spec.adapter):
        keep(
            "model",
            run.model_dir,
            lambda: save_model(
                trained.model, run.model_dir, base, base_logits_TV=trained.base_logits, metadata=metadata, replace=True
            ),
        )
        return
    keep(
        "adapter",
        run.adapter_dir,
        lambda: save_adapter(
            trained.model, run.adapter_dir, base, initial=trained.initial, metadata=metadata, replace=True
        ),
    )
    for folder in keep_beside(run, spec.adapter):
        told.say(f"kept {folder}")
    if spec.output.merge:
        trained.release()
        keep(
            "model",
            run.model_dir,
            lambda: merge_adapter(
                base,
                run.adapter_dir,
                run.model_dir,
                dtype="float32",
                metadata=metadata,
                quantization=spec.model.quantization,
                replace=True,
            ),
        )


def report(run: RunDir, objective: Objective, told: Narrator) -> None:
    """What happened, for programs and for people, and the card that lies with the artifact."""
    from gym_trainer.exporting.card import write_card
    from gym_trainer.report import write_report
    from gym_trainer.showing import before_and_after

    for path in write_report(run, state=RunState.SUCCEEDED):
        told.events.artifact("report", path.relative_to(run.path).as_posix(), path.stat().st_size)
    facts = records.read_json(run.report_path("json"))
    for folder in (run.adapter_dir, run.model_dir):
        if folder.is_dir():
            write_card(folder, facts)
    told.say(before_and_after(facts))
    told.say(f"report: {run.report_path('html')}")
    if objective.scores is None:
        told.say(f"talk to it: gym chat {run.path}")
