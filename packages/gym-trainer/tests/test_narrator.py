"""Guards how a run that is interrupted ends: its state says so, and a person is told how to go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gym_sdk.events import RunState
from gym_sdk.rundir import RunDir
from gym_trainer.narrator import recording

_AT_A_TERMINAL = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


@pytest.mark.parametrize("number", list(_AT_A_TERMINAL))
@pytest.mark.parametrize("quiet", [False, True])
def test_an_interrupted_run_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals, quiet: bool
) -> None:
    run = RunDir.create(tmp_path, "x")
    inherited = signal.signal(number, _AT_A_TERMINAL[number])  # tests in the background inherit ignored signals

    def work() -> None:
        with recording(run, quiet=quiet) as told:
            told.state(RunState.PREPARING)
            os.kill(os.getpid(), number)
            signal.pause()

    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert signal.getsignal(number) is _AT_A_TERMINAL[number]
    finally:
        signal.signal(number, inherited)
    assert run.state() is RunState.CANCELLED
    assert f"hint: go on with: gym train --resume {run.path}" in capsys.readouterr().err


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with recording(RunDir.create(tmp_path, "x"), quiet=True):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
