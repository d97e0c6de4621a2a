"""Guards many clients at once, and kills at random moments: no event lost or doubled, no wrong answer, flat memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from soak import Soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_two_hundred_streams_and_fifty_watchers(tmp_path: Path) -> None:
    soak = Soak(tmp_path, num_clients=200, num_watchers=50, seconds=40, kills=False)
    findings = asyncio.run(soak.run())
    assert set(findings.endings) == {"right"}, findings.lines()
    assert (findings.faults, findings.wrong) == ([], [])
    assert findings.num_jobs >= 1
    assert findings.memory_growth() < 1.2, findings.resident_bytes
    assert "Traceback" not in soak.daemon.log


def test_kills_at_random_moments_give_no_wrong_answer_and_lose_no_job(tmp_path: Path) -> None:
    soak = Soak(tmp_path, num_clients=20, num_watchers=5, seconds=40, kills=True, seed=1)
    findings = asyncio.run(soak.run())
    assert findings.wrong == []
    assert findings.faults == []
    assert findings.endings["right"] > 20, findings.lines()
    assert findings.kills.total() >= 5
