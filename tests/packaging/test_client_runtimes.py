"""Guards the client's wheel at the lowest and newest protobuf and grpcio that it allows, on a real daemon."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "packages/gym-serve/tests"))

from daemon_process import DaemonProcess  # noqa: E402
from model_folder import write_adapter_folder, write_model  # noqa: E402

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]
JOURNEY = Path(__file__).with_name("client_journey.py")
RUNTIMES = {
    "lowest": (["grpcio==1.66.2", "protobuf==5.27.2", "googleapis-common-protos==1.65.0"], "protobuf 5.27.2"),
    "newest": (["grpcio>=1.66.2", "protobuf>=7,<8"], "protobuf 7."),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        ["uv", "build", "--quiet", "--wheel", "--out-dir", folder, REPOSITORY / "packages/gym-sdk"], check=True
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("daemon")
    adapter = write_adapter_folder(folder / "adapter", "tuned")
    environment = {"GYM_TEST_ADAPTER": str(adapter)}
    with DaemonProcess(folder / "data", str(write_model(folder / "tiny")), environment=environment) as process:
        yield process.wait_ready()


@pytest.mark.parametrize("scheme", ["grpc", "http"])
@pytest.mark.parametrize("runtime", list(RUNTIMES))
def test_the_journey(daemon: DaemonProcess, wheel: Path, tmp_path: Path, runtime: str, scheme: str) -> None:
    pins, expected = RUNTIMES[runtime]
    command = ["uv", "run", "--isolated", "--no-project", "--quiet", "--python", "3.11", "--with", str(wheel)]
    command += [argument for pin in pins for argument in ("--with", pin)]
    address = daemon.grpc_target if scheme == "grpc" else daemon.http_url
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GYM_", "PYTHON"))}
    done = subprocess.run(
        [*command, "python", str(JOURNEY), address, daemon.key, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
