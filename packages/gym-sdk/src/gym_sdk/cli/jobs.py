"""`gym jobs`: training runs of a daemon."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated

from cyclopts import App, Parameter

from gym_sdk.cli import console
from gym_sdk.cli._connection import AsJson, ConnectionOptions, connect
from gym_sdk.cli._table import age, local_time, out_fields, out_list, plain
from gym_sdk.client import Gym
from gym_sdk.client._progress import OnProgress
from gym_sdk.client._sync.jobs import Job
from gym_sdk.client.types import JobState
from gym_sdk.errors import UserError

app: App = App(name="gym jobs", help="Training runs of a daemon.", version_flags=[])

FAILED = 1


@app.command
def submit(
    spec: str,
    /,
    *overrides: str,
    gpus: int | None = None,
    attempts: int | None = None,
    label: Annotated[list[str] | None, Parameter(negative="")] = None,
    watch: Annotated[bool, Parameter(negative="")] = False,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    as_json: AsJson = False,
    connection: ConnectionOptions = None,
) -> int:
    """Send a run.yaml and its data to a daemon, and queue it. Prints the job's id.

    Parameters
    ----------
    spec
        The run.yaml.
    overrides
        Fields to set, such as train.learning_rate=1e-4.
    gpus
        How many GPUs the job needs; the daemon chooses when left out.
    attempts
        How often the job is started in all, where its process or the machine dies.
    label
        A name=value to find it by; may be given several times.
    watch
        Stay and watch it.
    dry_run
        Let the daemon check everything and queue nothing.
    as_json
        Print the job as JSON.
    """
    labels = dict(_label(text) for text in label or [])
    with connect(connection) as gym:
        if dry_run:
            gym.jobs.validate(spec, overrides, num_gpus=gpus)
            console.err(f"{spec} is valid; nothing was queued")
            return 0
        job = gym.jobs.create(
            spec, overrides, num_gpus=gpus, max_attempts=attempts, labels=labels, on_upload=_upload_line
        )
        console.out_json(plain(job)) if as_json else console.out(job.id)
        if not watch:
            console.hint(f"gym jobs watch {job.id}")
            return 0
        return _watch(job, after=0)


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UserError(f"{text!r} is not a label", hint="labels look like class=7b")
    return name, value


def _upload_line(path: str) -> OnProgress:
    def tell(done: int, total: int) -> None:
        if done == total:
            console.err(f"sent {path} ({console.format_size(total)})")

    return tell


@app.command(name="list")
def list_jobs(
    *,
    state: Annotated[list[JobState] | None, Parameter(negative="")] = None,
    label: Annotated[list[str] | None, Parameter(negative="")] = None,
    everyone: Annotated[bool, Parameter(negative="")] = False,
    limit: int = 20,
    as_json: AsJson = False,
    connection: ConnectionOptions = None,
) -> None:
    """List jobs, newest first.

    Parameters
    ----------
    state
        Only jobs in this state; may be given several times.
    label
        Only jobs with this name=value; may be given several times.
    everyone
        Jobs of every key; needs an admin key.
    limit
        At most so many.
    as_json
        Print JSON.
    """
    labels = dict(_label(text) for text in label or [])
    with connect(connection) as gym:
        jobs = list(gym.jobs.list(states=state or (), labels=labels, all_owners=everyone, limit=limit))
    out_list(jobs, _COLUMNS, as_json=as_json, empty="no jobs; `gym jobs submit run.yaml` makes one")


def _steps(job: Job) -> str:
    progress = job.progress
    return f"{progress.step}/{progress.num_steps}" if progress.num_steps else ""


def _loss(job: Job) -> str:
    loss = job.progress.metrics.get("loss")
    return "" if loss is None else f"{loss:.4g}"


_COLUMNS: dict[str, Callable[[Job], object]] = {
    "ID": lambda job: job.id,
    "NAME": lambda job: job.name,
    "STATE": lambda job: job.state or "?",
    "STEPS": _steps,
    "LOSS": _loss,
    "AGE": lambda job: age(job.create_time),
}


@app.command
def get(job_id: str | None = None, /, *, as_json: AsJson = False, connection: ConnectionOptions = None) -> None:
    """Show a job; the newest when no id is given.

    Parameters
    ----------
    job_id
        The job.
    as_json
        Print JSON.
    """
    with connect(connection) as gym:
        job = _find(gym, job_id)
    if as_json:
        console.out_json(plain(job))
        return
    progress, failure = job.progress, job.failure
    out_fields(
        {
            "id": job.id,
            "name": job.name,
            "state": job.state or "unknown to this gym",
            "why": job.state_message,
            "in the queue": f"behind {job.queue_position}" if job.queue_position is not None else "",
            "steps": _steps(job),
            "time left": console.format_duration(progress.eta_s)
            if progress.eta_s is not None and job.state is JobState.RUNNING
            else "",
            "metrics": ", ".join(f"{name} {value:.4g}" for name, value in progress.metrics.items()),
            "attempt": job.attempt or "",
            "created": local_time(job.create_time),
            "started": local_time(job.start_time),
            "ended": local_time(job.end_time),
            "labels": ", ".join(f"{name}={value}" for name, value in job.labels.items()),
            "model": job.model_id,
            "failure": failure.message if failure else "",
            "hint": failure.hint if failure else "",
        }
    )
    for line in failure.log_lines if failure else ():
        console.out(f"  {line}")


def _find(gym: Gym, job_id: str | None) -> Job:
    if job_id is not None:
        return gym.jobs.get(job_id)
    newest = next(iter(gym.jobs.list(limit=1)), None)
    if newest is None:
        raise UserError("there are no jobs yet", hint="gym jobs submit run.yaml")
    console.err(f"the newest job: {newest.id}")
    return newest


@app.command
def watch(
    job_id: str | None = None,
    /,
    *,
    after: int = 0,
    as_json: AsJson = False,
    connection: ConnectionOptions = None,
) -> int:
    """Watch a job until it ends: its state, its steps, and the curve of its loss. The newest when no id is given.

    Leaving (Ctrl-C) ends nothing but the watching. The exit code is 0 where the job succeeded.

    Parameters
    ----------
    job_id
        The job.
    after
        Begin after the event of this number.
    as_json
        Print each event as a line of JSON.
    """
    with connect(connection) as gym:
        job = _find(gym, job_id)
        if not as_json:
            return _watch(job, after=after)
        state = job.state
        for event in job.events(after=after, follow=True):
            state = event.state or state
            kind = type(event.run).__name__.removesuffix("Event").lower() if event.run is not None else "job"
            console.out(json.dumps({"kind": kind, **plain(event)}, ensure_ascii=False, allow_nan=False))
        return 0 if state is JobState.SUCCEEDED else FAILED


def _watch(job: Job, *, after: int) -> int:
    from gym_sdk.cli._watch import watch as show

    state = show(job, job.events(after=after, follow=True))
    ended = job.refresh()
    if state is JobState.SUCCEEDED:
        console.err(f"job {job.id} succeeded" + (f"; its model is {ended.model_id}" if ended.model_id else ""))
        console.hint(f"gym chat {ended.model_id or 'MODEL'}, or gym jobs download {job.id}")
        return 0
    reason = ended.failure.message if ended.failure else ended.state_message
    console.err(f"job {job.id} {ended.state}" + (f": {reason}" if reason else ""))
    console.hint((ended.failure.hint if ended.failure else "") or f"gym jobs logs {job.id}")
    return FAILED


@app.command
def logs(
    job_id: str | None = None,
    /,
    *,
    follow: Annotated[bool, Parameter(negative="", alias="-f")] = False,
    connection: ConnectionOptions = None,
) -> None:
    """Print what a job's processes printed. The newest job when no id is given.

    Parameters
    ----------
    job_id
        The job.
    follow
        Go on as they print, until the job ends.
    """
    with connect(connection) as gym:
        for text in _find(gym, job_id).logs(follow=follow):
            console.out(text.rstrip("\n"))


@app.command
def cancel(job_id: str, /, *, connection: ConnectionOptions = None) -> None:
    """End a job and keep its last checkpoint."""
    with connect(connection) as gym:
        console.err(f"job {job_id} is {gym.jobs.cancel(job_id).state}")


@app.command
def pause(job_id: str, /, *, connection: ConnectionOptions = None) -> None:
    """Stop a job at its next checkpoint."""
    with connect(connection) as gym:
        console.err(f"job {job_id} is {gym.jobs.pause(job_id).state}")
    console.hint(f"gym jobs resume {job_id}")


@app.command
def resume(job_id: str, /, *, connection: ConnectionOptions = None) -> None:
    """Queue a paused, failed or cancelled job again, from its last checkpoint."""
    with connect(connection) as gym:
        console.err(f"job {job_id} is {gym.jobs.resume(job_id).state}")


@app.command
def delete(*job_ids: str, connection: ConnectionOptions = None) -> None:
    """Delete ended jobs with their run directories. Models made by them stay."""
    with connect(connection) as gym:
        for job_id in job_ids:
            gym.jobs.delete(job_id)
            console.err(f"job {job_id} is deleted")


@app.command
def download(
    job_id: str | None = None,
    folder: str | None = None,
    /,
    *,
    kind: str | None = None,
    connection: ConnectionOptions = None,
) -> None:
    """Fetch what a job has made. Prints the folder. Goes on where an earlier download broke off.

    Parameters
    ----------
    job_id
        The job; the newest when left out.
    folder
        Where to; `KIND-JOB` in the current folder when left out.
    kind
        adapter, model, experiences or report; the first of these that the job has made when left out.
    """
    with connect(connection) as gym:
        job = _find(gym, job_id)
        if kind is None:
            made = {artifact.kind for artifact in job.artifacts()}
            kind = next((result for result in ("adapter", "model", "experiences") if result in made), "adapter")
        artifact = job.artifact(kind)
        size_bytes = artifact.describe().size_bytes
        with console.progress(size_bytes, "bytes", f"{kind} of {job.id}") as progress:
            path = artifact.download(
                folder or f"{kind}-{job.id}", on_progress=lambda done, total: progress.update(done, total)
            )
    console.out(str(path))
