"""Shared by the tests of gym-sdk: a fake daemon over both transports, and a machine without settings of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gym_sdk_fakes.daemon import KEY, Daemon
from gym_sdk_fakes.servers import serve_connect, serve_grpc

from gym_sdk.client import Gym, _retry


@pytest.fixture(autouse=True)
def clean_machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings, keys or caches of whoever runs the tests."""
    folder = tmp_path_factory.mktemp("machine")
    for name in ("GYM_CONFIG_DIR", "GYM_DATA_DIR", "GYM_CACHE_DIR"):
        monkeypatch.setenv(name, str(folder / name.lower()))
    for name in ("GYM_BASE_URL", "GYM_API_KEY", "GYM_PROFILE", "GYM_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def daemon() -> Daemon:
    """The state of a fake daemon."""
    return Daemon()


@pytest.fixture(params=["grpc", "http"])
def base_url(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[str]:
    """The fake daemon's address, once for each transport."""
    if request.param == "grpc":
        server, port = serve_grpc(daemon)
        yield f"grpc://127.0.0.1:{port}"
        server.stop(grace=None).wait(timeout=10)
    else:
        http_server, port = serve_connect(daemon)
        yield f"http://127.0.0.1:{port}"
        http_server.shutdown()
        http_server.server_close()


@pytest.fixture
def gym(base_url: str) -> Iterator[Gym]:
    """A client of the fake daemon."""
    with Gym(base_url, api_key=KEY, timeout_s=30, patience_s=30) as client:
        yield client


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_retry, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(_retry, "LARGEST_DELAY_S", 0.01)


@pytest.fixture
def spec_path(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_bytes(b'{"messages": []}\n' * 10)
    path = tmp_path / "run.yaml"
    path.write_text("name: notes\nmodel: {source: Qwen/Qwen3-8B}\ndata: {train: [{source: rows.jsonl}]}\n")
    return path


@pytest.fixture(scope="session")
def sdk_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it is now. uv would take a folder's build from its cache, however old."""
    folder = tmp_path_factory.mktemp("wheel")
    package = Path(__file__).resolve().parents[1]
    subprocess.run(["uv", "build", "--quiet", "--wheel", "--out-dir", folder, package], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel
