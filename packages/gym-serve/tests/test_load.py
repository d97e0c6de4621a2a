"""Guards many clients at once, and SIGKILL at random moments: nothing is lost, doubled or wrong, and memory is flat."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from soak import VICTIMS, Findings, Soak


def with_kills(folder: Path, *, num_kills: int, seed: int) -> Findings:
    soak = Soak(folder, num_clients=6, num_watchers=2, num_kills=num_kills, kill_every_s=0.8, pause_s=0.1, seed=seed)
    findings = asyncio.run(soak.run())
    assert findings.wrong == []
    assert findings.faults == []
    assert findings.endings["right"] > 0, findings.lines()
    assert findings.kills.total() == num_kills
    return findings


def test_kills_at_five_moments_lose_nothing_that_was_accepted(tmp_path: Path) -> None:
    with_kills(tmp_path, num_kills=5, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_at_twenty_moments_lose_nothing_that_was_accepted(tmp_path: Path) -> None:
    """SIGKILL of the daemon, the engine's process, supervisors and jobs."""
    assert set(with_kills(tmp_path, num_kills=20, seed=0).kills) == set(VICTIMS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_streams_and_fifty_watchers(tmp_path: Path) -> None:
    soak = Soak(tmp_path, num_clients=200, num_watchers=50, seconds=40)
    findings = asyncio.run(soak.run())
    assert set(findings.endings) == {"right"}, findings.lines()
    assert (findings.faults, findings.wrong) == ([], [])
    assert findings.num_jobs >= 1
    assert findings.memory_growth() < 1.2, findings.resident_bytes
    assert "Traceback" not in soak.daemon.log
