"""A daemon as a process of its own, for tests that talk to it as clients do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import httpx

TESTS = Path(__file__).parent
STAND_IN_TRAINER = [sys.executable, str(TESTS / "stand_in_trainer.py")]
START_S = 60.0


class DaemonProcess:
    """`gym serve` on free ports over a data directory."""

    def __init__(
        self,
        data_dir: Path,
        *arguments: str,
        settings: str = "",
        environment: dict[str, str] | None = None,
        engine: str = "stand_in_engine:start",
        ports: tuple[int, int] = (0, 0),
    ) -> None:
        self.data_dir = data_dir
        data_dir.mkdir(parents=True, exist_ok=True)
        self.log_path = data_dir / "daemon.log"
        settings_path = data_dir / "settings.toml"
        command = json.dumps(STAND_IN_TRAINER)
        head = f'[engine]\nkind = "{engine}"\n' if engine else ""
        if "[jobs]" not in settings:
            head += f"[jobs]\ncommand = {command}\nretry_delay_s = 0.0\ncancel_grace_s = 0.5\n"
            head += 'environment = ["GYM_TEST_ADAPTER"]\nmax_cpu_jobs = 2\n'
        settings_path.write_text(head + settings, encoding="utf-8")
        self._command = [
            sys.executable,
            *("-c", "from gym_sdk.cli import main; main()", "serve"),
            *arguments,
            *("--port", str(ports[0]), "--grpc-port", str(ports[1])),
            *("--data-dir", str(data_dir), "--settings", str(settings_path)),
        ]
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("GYM_")},
            "PYTHONPATH": str(TESTS),
            **(environment or {}),
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.http_url = ""
        self.grpc_target = ""

    def start(self) -> DaemonProcess:
        """Starts it and waits until it listens."""
        address_file = self.data_dir / "daemon.json"
        address_file.unlink(missing_ok=True)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while not address_file.exists():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)
        addresses = json.loads(address_file.read_text(encoding="utf-8"))
        self.http_url, self.grpc_target = addresses["http_url"], addresses["grpc_target"]
        return self

    def wait_ready(self) -> DaemonProcess:
        """Waits until the first model answers."""
        deadline = time.monotonic() + START_S
        while httpx.get(f"{self.http_url}/readyz").status_code != 200:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)
        return self

    @property
    def key(self) -> str:
        """The local key."""
        return (self.data_dir / "local.key").read_text(encoding="ascii").strip()

    @property
    def grpc_address(self) -> str:
        """Host and port."""
        return self.grpc_target.partition("://")[2]

    @property
    def log(self) -> str:
        """All that it wrote."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def http(self, key: str | None = None) -> httpx.Client:
        """A plain HTTP client with a key."""
        return httpx.Client(
            base_url=self.http_url, headers={"authorization": f"Bearer {key or self.key}"}, timeout=60.0
        )

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def __enter__(self) -> DaemonProcess:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()
