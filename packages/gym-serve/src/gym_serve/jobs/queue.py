"""Which waiting jobs start now. A pure function of the state, so that its promises can be tested without processes.

Promises:
- a job never starts on a GPU that another one holds, nor above a limit;
- keys take turns: the next job belongs to the key with the fewest running jobs, among these to the one whose last
  start is longest ago; within a key, first come, first served;
- a job that needs more GPUs than are free may be overtaken by smaller ones for `overtake_s`; after that what
  becomes free is kept for it, so it cannot starve.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gym_serve.jobs.model import Job


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What all jobs together may use."""

    num_gpus: int
    max_cpu_jobs: int
    max_running_per_key: int
    overtake_s: float


@dataclass(frozen=True, kw_only=True)
class Running:
    """A job that holds GPUs, or a place among the jobs without one."""

    owner: str
    gpus: Sequence[int]


def choose(
    queued: Sequence[Job],
    running: Sequence[Running],
    last_started: Mapping[str, float],
    capacity: Capacity,
    now: float,
    max_running: Mapping[str, int] | None = None,
) -> list[tuple[Job, list[int]]]:
    """The jobs to start, in order, each with its GPUs' indices. `last_started` is the time of each key's last start;
    `max_running` has the keys with a limit of their own."""
    own_limits = max_running or {}
    free = sorted(set(range(capacity.num_gpus)) - {gpu for one in running for gpu in one.gpus})
    free_places = capacity.max_cpu_jobs - sum(1 for one in running if not one.gpus)
    num_running = Counter(one.owner for one in running)
    last_started = dict(last_started)
    waiting = [job for job in queued if job.not_before <= now and job.num_gpus <= capacity.num_gpus]
    chosen: list[tuple[Job, list[int]]] = []
    kept = False

    def turn(job: Job) -> tuple[int, float, float, str]:
        return (num_running[job.owner], last_started.get(job.owner, 0.0), job.queued_at, job.id)

    while waiting:
        for job in sorted(waiting, key=turn):
            if num_running[job.owner] >= own_limits.get(job.owner, capacity.max_running_per_key):
                continue
            if job.num_gpus == 0:
                if free_places <= 0:
                    continue
                free_places -= 1
            elif kept or job.num_gpus > len(free):
                kept = kept or now - job.queued_at > capacity.overtake_s
                continue
            gpus, free = free[: job.num_gpus], free[job.num_gpus :]
            chosen.append((job, gpus))
            waiting.remove(job)
            num_running[job.owner] += 1
            last_started[job.owner] = now
            break
        else:
            break
    return chosen
