"""Guards a class of thirty on one GPU, in simulated time with the scheduler that runs: turns, quotas, no idle card.

Each pupil has a key. One of them floods the queue at the bell; the others come when they are ready, with jobs of two to
twenty minutes. Nothing here knows how `choose` works: the promises are checked on who ran when.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from test_queue import capacity, job

from gym_serve.jobs.model import Job
from gym_serve.jobs.queue import Capacity, Running, choose

NUM_PUPILS = 30
MINUTE = 60.0
FLOOD = "pupil-0"


@dataclass
class Lesson:
    """A daemon's queue in simulated time."""

    limits: Capacity
    own_limits: dict[str, int] = field(default_factory=dict)
    now: float = 1000.0
    queued: list[Job] = field(default_factory=list)
    running: dict[str, tuple[Job, list[int]]] = field(default_factory=dict)
    last_started: dict[str, float] = field(default_factory=dict)
    started: list[tuple[float, Job]] = field(default_factory=list)
    idle_s: float = 0.0
    """How long GPUs were free while a job waited that could have had them."""

    def run(self, arrivals: list[tuple[float, Job]], minutes: dict[str, float]) -> None:
        order = itertools.count()
        events = [(time, next(order), "comes", job) for time, job in arrivals]
        heapq.heapify(events)
        while events:
            time, _, what, job = heapq.heappop(events)
            if self.queued and len(self.running) < self.limits.num_gpus and not self.own_limits:
                self.idle_s += time - self.now
            self.now = time
            if what == "comes":
                self.queued.append(job)
            else:
                del self.running[job.id]
            running = [Running(owner=each.owner, gpus=gpus) for each, gpus in self.running.values()]
            chosen = choose(self.queued, running, self.last_started, self.limits, self.now, self.own_limits)
            for each, gpus in chosen:
                self.queued.remove(each)
                self.running[each.id] = (each, gpus)
                self.last_started[each.owner] = self.now
                self.started.append((self.now, each))
                heapq.heappush(events, (self.now + minutes[each.id] * MINUTE, next(order), "ends", each))
            self.check()

    def check(self) -> None:
        """Called at every moment at which something changes."""
        held = [gpu for _, gpus in self.running.values() for gpu in gpus]
        assert len(held) == len(set(held)) <= self.limits.num_gpus


def a_class(seed: int) -> tuple[list[tuple[float, Job]], dict[str, float]]:
    """Arrivals and durations: 32 jobs of one key at the bell, three of each other key over half an hour."""
    chance = random.Random(seed)
    arrivals = [(1000.0, job(f"{FLOOD}/{n}", FLOOD, queued_at=1000.0 + n / 100)) for n in range(32)]
    for pupil in range(1, NUM_PUPILS):
        times = sorted(1000.0 + chance.random() * 30 * MINUTE for _ in range(3))
        name = f"pupil-{pupil}"
        arrivals += [(time, job(f"{name}/{n}", name, queued_at=time)) for n, time in enumerate(times)]
    minutes = {each.id: chance.uniform(2, 20) for _, each in arrivals}
    return arrivals, minutes


@pytest.mark.parametrize("seed", range(20))
def test_turns_are_taken_whatever_one_key_does(seed: int) -> None:
    arrivals, minutes = a_class(seed)
    lesson = Lesson(capacity(1))
    lesson.run(arrivals, minutes)
    assert len(lesson.started) == len(arrivals)
    assert lesson.idle_s == 0.0
    owners = [each.owner for _, each in lesson.started]
    came = {each.id: time for time, each in arrivals}
    began = {each.id: (place, time) for place, (time, each) in enumerate(lesson.started)}
    for pupil in range(1, NUM_PUPILS):
        ids = [f"pupil-{pupil}/{n}" for n in range(3)]
        assert [began[each][1] for each in ids] == sorted(began[each][1] for each in ids), "first come, first served"
        # From the time it waits to its start, nobody else gets two turns: at most one start of each other key.
        waited_from = max(came[ids[0]], 1000.0)
        turns = Counter(
            owner
            for (time, _), owner in zip(lesson.started, owners, strict=True)
            if waited_from < time < began[ids[0]][1]
        )
        assert max(turns.values(), default=0) <= 1, (pupil, turns)
        assert turns.total() < NUM_PUPILS


def test_everyone_is_served_alike_while_all_wait() -> None:
    """All thirty with more work than the day holds: the numbers of their turns differ by one at most, all day long."""
    arrivals = [
        (1000.0, job(f"p{p}/{n}", f"p{p}", queued_at=1000.0 + p + n / 10)) for p in range(30) for n in range(10)
    ]
    chance = random.Random(5)
    minutes = {each.id: chance.uniform(1, 30) for _, each in arrivals}
    lesson = Lesson(capacity(1))
    lesson.run(arrivals, minutes)
    turns: Counter[str] = Counter({f"p{p}": 0 for p in range(30)})
    for _, each in lesson.started:
        turns[each.owner] += 1
        assert max(turns.values()) - min(turns.values()) <= 1


def test_quotas_of_keys_hold_at_every_moment() -> None:
    """Six GPUs; two of the keys may have one job and none. What they may not use, the others do."""
    limits = capacity(6, per_key=2)
    own = {"pupil-1": 1, "pupil-2": 0}
    chance = random.Random(2)
    arrivals = [
        (1000.0 + chance.random() * 600, job(f"pupil-{p}/{n}", f"pupil-{p}", num_gpus=chance.choice((1, 1, 2))))
        for p in range(6)
        for n in range(8)
    ]
    arrivals = [(time, replace(each, queued_at=time)) for time, each in arrivals]
    minutes = {each.id: chance.uniform(1, 9) for _, each in arrivals}

    most: Counter[str] = Counter()

    class Watched(Lesson):
        def check(self) -> None:
            super().check()
            running = Counter(each.owner for each, _ in self.running.values())
            assert all(count <= own.get(owner, 2) for owner, count in running.items())
            most.update({owner: count - most[owner] for owner, count in running.items() if count > most[owner]})

    lesson = Watched(limits, own)
    lesson.run(arrivals, minutes)
    assert max(most.values()) == 2, "the limit was met"
    assert [each.owner for each in lesson.queued] == ["pupil-2"] * 8
    assert Counter(each.owner for _, each in lesson.started) == {f"pupil-{p}": 8 for p in range(6) if p != 2}
