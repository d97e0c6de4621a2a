"""Guards who starts next: turns between keys, whole GPUs, limits, and no starving of large jobs."""

from __future__ import annotations

import random
from collections import Counter

from gym_serve.jobs.model import Job, JobState
from gym_serve.jobs.queue import Capacity, Running, choose


def job(name: str, owner: str, num_gpus: int = 1, queued_at: float = 0.0, not_before: float = 0.0) -> Job:
    return Job(
        id=name,
        owner=owner,
        name=name,
        spec_json="{}",
        spec_sha256="",
        labels={},
        origin={},
        num_gpus=num_gpus,
        max_attempts=1,
        state=JobState.QUEUED,
        message="",
        failure=None,
        progress=b"",
        created_at=queued_at,
        queued_at=queued_at,
        started_at=None,
        finished_at=None,
        attempt=0,
        not_before=not_before,
        run_dir=None,
        run_cursor=0,
        last_sequence=0,
        model_id=None,
    )


def capacity(num_gpus: int = 1, *, cpu: int = 1, per_key: int = 10, overtake_s: float = 600.0) -> Capacity:
    return Capacity(num_gpus=num_gpus, max_cpu_jobs=cpu, max_running_per_key=per_key, overtake_s=overtake_s)


def names(chosen: list[tuple[Job, list[int]]]) -> list[str]:
    return [each.id for each, _ in chosen]


def test_a_class_of_thirty_on_one_gpu_takes_turns() -> None:
    """Each of thirty keys waits with three jobs; nobody's second job runs before everybody's first."""
    queued = [job(f"{seat}-{n}", f"seat-{seat}", queued_at=seat + n / 10) for seat in range(30) for n in range(3)]
    last_started: dict[str, float] = {}
    order: list[str] = []
    for now in range(100, 190):
        (first, gpus), *more = choose(queued, [], last_started, capacity(), float(now))
        assert (gpus, more) == ([0], [])
        queued.remove(first)
        last_started[first.owner] = float(now)
        order.append(first.owner)
    for round_number in range(3):
        assert len(set(order[30 * round_number : 30 * (round_number + 1)])) == 30


def test_gpus_are_held_by_one_job_each() -> None:
    queued = [job("a", "x", 2), job("b", "y", 1), job("c", "z", 1)]
    chosen = choose(queued, [Running(owner="w", gpus=[1])], {}, capacity(4), 1.0)
    assert names(chosen) == ["a", "b"]
    assert [gpus for _, gpus in chosen] == [[0, 2], [3]]


def test_a_large_job_is_overtaken_only_for_a_while() -> None:
    running = [Running(owner="w", gpus=[0])]
    queued = [job("large", "x", 2, queued_at=0.0), job("small", "y", 1, queued_at=5.0)]
    assert names(choose(queued, running, {}, capacity(2, overtake_s=60), 30.0)) == ["small"]
    assert names(choose(queued, running, {}, capacity(2, overtake_s=60), 90.0)) == []
    assert names(choose(queued, [], {}, capacity(2, overtake_s=60), 90.0)) == ["large"]


def test_limits_and_delays_hold() -> None:
    queued = [job("a", "x", 0), job("b", "x", 0), job("c", "y", 0, not_before=50.0), job("d", "z", 9)]
    assert names(choose(queued, [], {}, capacity(1, cpu=3, per_key=1), 1.0)) == ["a"]
    assert names(choose(queued, [], {}, capacity(1, cpu=3, per_key=1), 60.0)) == ["a", "c"]
    assert names(choose(queued, [], {}, capacity(1, cpu=3), 1.0, {"x": 2})) == ["a", "b"]
    assert names(choose(queued, [], {}, capacity(1, cpu=3), 1.0, {"x": 0})) == []


def test_nothing_is_ever_above_the_capacity() -> None:
    chance = random.Random(1)
    for _ in range(300):
        limits = capacity(chance.randrange(5), cpu=chance.randrange(4), per_key=chance.randrange(1, 4))
        queued = [job(str(n), f"k{chance.randrange(4)}", chance.randrange(4), chance.random() * 900) for n in range(12)]
        running = [
            Running(owner=f"k{chance.randrange(4)}", gpus=[gpu])
            for gpu in range(limits.num_gpus)
            if chance.random() < 0.3
        ]
        chosen = choose(queued, running, {}, limits, 1000.0)
        held = [gpu for one in running for gpu in one.gpus] + [gpu for _, gpus in chosen for gpu in gpus]
        assert len(held) == len(set(held))
        assert all(0 <= gpu < limits.num_gpus for gpu in held)
        assert sum(1 for each, _ in chosen if each.num_gpus == 0) <= limits.max_cpu_jobs
        started = Counter(each.owner for each, _ in chosen)
        before = Counter(one.owner for one in running)
        assert all(before[owner] + count <= limits.max_running_per_key for owner, count in started.items())
        assert all(len(gpus) == each.num_gpus for each, gpus in chosen)
