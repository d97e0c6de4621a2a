"""Guards that the SDK and `gym --help` load nothing heavy and cost little."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "grpc", "pydantic", "pydantic_core", "google.protobuf", "cyclopts", "rich", "yaml")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def loaded(code: str) -> set[str]:
    modules = run(f"{code}\nimport sys\nprint('\\n'.join(sys.modules))").splitlines()
    return {name for name in HEAVY if name in modules}


@pytest.mark.parametrize(
    "code",
    [
        "import gym_sdk",
        "import gym_sdk.errors, gym_sdk.events, gym_sdk.spec, gym_sdk.client, gym_sdk.rundir",
        "import gym_sdk.cli, gym_sdk._commands",
        "import contextlib, io\nfrom gym_sdk.cli._root import run\n"
        "with contextlib.redirect_stdout(io.StringIO()): run(['--help'])",
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_used(code: str) -> None:
    assert loaded(code) == set()


def cpu_seconds(code: str) -> float:
    """The processor time of a fresh interpreter: other work on the machine does not count."""
    read = "import resource; r = resource.getrusage(resource.RUSAGE_SELF); print(r.ru_utime + r.ru_stime)"
    return float(run(f"{code}\n{read}").splitlines()[-1])


@pytest.mark.skipif(os.name == "nt", reason="resource")
def test_importing_the_sdk_costs_under_100_ms_over_a_bare_interpreter() -> None:
    bare = statistics.median(cpu_seconds("pass") for _ in range(5))
    with_sdk = statistics.median(cpu_seconds("import gym_sdk") for _ in range(5))
    assert with_sdk - bare < 0.1


@pytest.mark.skipif(os.name == "nt", reason="resource")
def test_help_takes_under_half_a_second() -> None:
    code = "from gym_sdk.cli._root import run\nrun(['--help'])"
    assert statistics.median(cpu_seconds(code) for _ in range(5)) < 0.5
