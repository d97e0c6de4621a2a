"""Guards the client at the lowest and newest protobuf and grpcio that it allows, and where Unix is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gym_sdk_fakes.daemon import KEY

JOURNEY = Path(__file__).with_name("wide_runtime_journey.py")

RUNTIMES = {
    "lowest": ["grpcio==1.66.2", "protobuf==5.27.2", "googleapis-common-protos==1.65.0"],
    "newest": ["grpcio>=1.66.2", "protobuf>=7,<8"],
}


@pytest.mark.packaging
@pytest.mark.parametrize("runtime", list(RUNTIMES))
def test_the_client_makes_its_journey(base_url: str, sdk_wheel: Path, tmp_path: Path, runtime: str) -> None:
    pins = [argument for pin in RUNTIMES[runtime] for argument in ("--with", pin)]
    command = ["uv", "run", "--isolated", "--no-project", "--python", "3.11", "--with", str(sdk_wheel), *pins]
    result = subprocess.run(
        [*command, "python", str(JOURNEY), base_url, KEY, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    if runtime == "lowest":
        assert result.stdout == "grpcio 1.66.2 protobuf 5.27.2\n"
    else:
        assert "protobuf 7." in result.stdout


def test_nothing_that_only_unix_has_is_needed(tmp_path: Path) -> None:
    code = """
import sys
for name in ("fcntl", "readline", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
import os
del os.O_DIRECTORY
from pathlib import Path
from gym_sdk.events import EventWriter
from gym_sdk.rundir import RunDir
import gym_sdk.cli._root, gym_sdk.cli.chat, gym_sdk.cli.jobs, gym_sdk.cli.files, gym_sdk.cli.models, gym_sdk.cli.keys
from gym_sdk.client import AsyncGym, Gym
gym_sdk.cli.chat._use_line_editing()
run = RunDir.create(sys.argv[1], "x")
with EventWriter(run.events_path) as events:
    events.state("succeeded")
print(RunDir.open(run.path).state())
"""
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "succeeded\n"), result.stderr
