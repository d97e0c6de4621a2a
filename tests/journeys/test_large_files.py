"""Guards 200 MB on a line that breaks, both ways: only the rest is sent again, and neither end holds it in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from line import Line

from gym_sdk.client import Gym
from gym_sdk.client.types import FilePurpose

MEBIBYTE = 1 << 20
SIZE_BYTES = 200 * 1000 * 1000
IN_FLIGHT_BYTES = 6 * MEBIBYTE
"""What may be sent twice: a chunk, and what sockets and HTTP/2 windows hold."""
GROWTH_BYTES = 48 * MEBIBYTE
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("daemon")) as process:
        yield process


def write_noise(path: Path, seed: int) -> None:
    block = bytearray(os.urandom(MEBIBYTE))
    with path.open("wb") as file:
        for number in range(-(-SIZE_BYTES // MEBIBYTE)):
            block[:16] = (seed * 1_000_000 + number).to_bytes(16, "big")
            file.write(block[: SIZE_BYTES - file.tell()])


def same(one: Path, other: Path) -> bool:
    with one.open("rb") as left, other.open("rb") as right:
        while (piece := left.read(MEBIBYTE)) == right.read(MEBIBYTE):
            if not piece:
                return True
    return False


class Peak:
    """The most memory that a process has had since this was made (Linux)."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        (self._folder / "clear_refs").write_text("5", encoding="ascii")
        self._before = self._read("VmRSS")

    def _read(self, name: str) -> int:
        lines = (self._folder / "status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

    @property
    def growth_bytes(self) -> int:
        return self._read("VmHWM") - self._before


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_200_mb_go_both_ways_over_a_line_that_is_cut_at_60_percent(
    daemon: DaemonProcess, tmp_path: Path, scheme: str
) -> None:
    source, target = tmp_path / "adapter_model.safetensors", tmp_path / "back"
    write_noise(source, seed=len(scheme) + ord(scheme[0]))
    assert daemon.process is not None
    with Line() as line:
        line.lead_to(daemon.grpc_address if scheme == "grpc" else daemon.http_url.partition("://")[2])
        with Gym(f"{scheme}://{line.address}", api_key=daemon.key, timeout_s=120, patience_s=120) as gym:
            gym.server_info()  # whatever is imported on first use is in memory now
            there, here = Peak(daemon.process.pid), Peak(os.getpid())
            line.cut_after_bytes_up = line.bytes_up + SIZE_BYTES * 6 // 10
            file = gym.files.upload(source, FilePurpose.ADAPTER)
            assert line.cut_after_bytes_up is None, "the line was cut"
            assert (file.size_bytes, line.bytes_up < SIZE_BYTES + IN_FLIGHT_BYTES) == (SIZE_BYTES, True)
            line.cut_after_bytes_down = line.bytes_down + SIZE_BYTES * 6 // 10
            gym.files.download(file.id, target)
            assert line.cut_after_bytes_down is None, "the line was cut"
            assert line.bytes_down < SIZE_BYTES + IN_FLIGHT_BYTES
            assert there.growth_bytes < GROWTH_BYTES, f"{there.growth_bytes / MEBIBYTE:.0f} MiB in the daemon"
            assert here.growth_bytes < GROWTH_BYTES, f"{here.growth_bytes / MEBIBYTE:.0f} MiB in the client"
    assert same(source, target)
