"""Guards the files below deploy/: what they name is there, and means what the daemon means by it."""

from __future__ import annotations

import configparser
import inspect
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from gym_serve.cli.serve import serve
from gym_serve.gpus import plan_gpus
from gym_serve.settings import Settings, load_settings

DEPLOY = Path(__file__).parents[3] / "deploy"
OPTIONS = {f"--{name.replace('_', '-')}" for name in inspect.signature(serve).parameters}


def test_the_unit_starts_the_daemon_and_leaves_its_jobs_running() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read_string((DEPLOY / "systemd" / "gym-serve.service").read_text(encoding="utf-8"))
    service = unit["Service"]
    command = service["ExecStart"].split()
    assert command[:2] == ["/opt/gym/bin/gym", "serve"]
    assert {word for word in command if word.startswith("--")} <= OPTIONS
    assert service["KillMode"] == "process", "supervisors outlive the daemon"
    assert service["RestartPreventExitStatus"] == "2", "a mistake in the settings is not mended by starting again"
    assert float(service["TimeoutStopSec"]) > Settings().server.drain_timeout_s
    socket = configparser.ConfigParser(strict=False, interpolation=None)
    socket.read_string((DEPLOY / "systemd" / "gym-serve.socket").read_text(encoding="utf-8"))
    assert socket["Socket"]["ListenStream"] == f"{Settings().server.host}:{Settings().server.port}"
    assert "gym-serve.socket" in unit["Unit"]["Wants"].split()
    assert service["ReadWritePaths"] == command[command.index("--data-dir") + 1]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    command = tmp_path / "gym"
    command.write_text("#!/bin/sh\n", encoding="utf-8")
    command.chmod(0o755)
    for unit in (DEPLOY / "systemd").iterdir():
        text = unit.read_text(encoding="utf-8").replace("/opt/gym/bin/gym", str(command))
        (tmp_path / unit.name).write_text(text, encoding="utf-8")
    units = [str(tmp_path / unit.name) for unit in (DEPLOY / "systemd").iterdir()]
    checked = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert (checked.returncode, [line for line in checked.stderr.splitlines() if "gym-serve" in line]) == (0, [])


def test_the_container_is_built_from_what_is_here_and_asks_for_keys() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    for name in re.findall(r"/src/packages/([\w-]+)", text):
        assert (DEPLOY.parent / "packages" / name / "pyproject.toml").is_file(), name
    server = Settings().server
    assert f"EXPOSE {server.port} {server.grpc_port}" in text
    assert f"http://127.0.0.1:{server.port}/healthz" in text
    (entrypoint,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    assert {word for word in json.loads(entrypoint)[2:] if word.startswith("--")} == {"--keep-running"} <= OPTIONS
    (service,) = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text(encoding="utf-8"))["services"].values()
    assert (DEPLOY / "docker" / service["build"]["context"]).resolve() == DEPLOY.parent
    assert (DEPLOY.parent / service["build"]["dockerfile"]).is_file()
    assert {word for word in service["command"] if word.startswith("--")} <= OPTIONS
    assert [port.rpartition(":")[2] for port in service["ports"]] == [str(server.port), str(server.grpc_port)]
    assert all(service["environment"][name].startswith(f"${{{name}:?") for name in ("GYM_API_KEY", "GYM_ADMIN_KEY"))


def test_the_settings_for_a_cluster_are_settings() -> None:
    settings = load_settings(DEPLOY / "slurm" / "serve.toml", {})
    assert settings.jobs.launcher == "slurm"
    plan = plan_gpus(settings, 0)
    assert (plan.num_for_jobs, plan.device) == (settings.jobs.num_gpus, "cpu")
