"""Jobs as processes of this machine, each under a supervisor (see `gym_serve.jobs.supervisor`).

A process is known by its id, its start time and the machine's boot: ids are used again, start times within one boot
are not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gym_sdk.errors import GymError
from gym_serve.jobs.supervisor import read_stat
from gym_serve.launchers.base import TOKEN_VARIABLE, Launch, Outcome, read_outcome

_SWEEP_S = 5.0


class LocalLauncher:
    """Starts supervisors beside the daemon. They are no children that it must wait for: see `is_alive`."""

    def __init__(self) -> None:
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, launch: Launch, record: Callable[[dict[str, object]], None]) -> None:
        """Starts the supervisor, has its identity recorded, then lets it begin."""
        launch.directory.mkdir(parents=True, exist_ok=True)
        with (launch.directory / "supervisor.log").open("ab") as log:
            supervisor = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "gym_serve.jobs.supervisor",
                    str(launch.directory),
                    str(launch.output),
                    str(launch.grace_s),
                    "--",
                    *launch.command,
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=launch.working_directory,
                env={**launch.environment, TOKEN_VARIABLE: launch.token},
                start_new_session=True,
            )
        assert supervisor.stdin is not None
        try:
            stat = read_stat(supervisor.pid)
            assert stat is not None, "a child that was not waited for has an entry in /proc"
            record(
                {
                    "pid": supervisor.pid,
                    "start_ticks": stat.start_ticks,
                    "boot_id": _boot_id(),
                    "token": launch.token,
                }
            )
        except BaseException:
            supervisor.stdin.close()  # the end of its input: it leaves without starting anything
            supervisor.wait()
            raise
        try:
            supervisor.stdin.write(b"go\n")
            supervisor.stdin.close()
        except OSError as error:
            raise GymError(f"the job's supervisor ended at once: {error}") from None
        self._started[supervisor.pid] = supervisor

    def is_alive(self, process: Mapping[str, object]) -> bool:
        """Whether the recorded supervisor, and no later process of the same id, still runs."""
        pid = _pid(process)
        if (child := self._started.get(pid)) is not None and child.poll() is not None:
            del self._started[pid]  # reaped
        if process.get("boot_id") != _boot_id():
            return False
        stat = read_stat(pid)
        return stat is not None and stat.state != "Z" and stat.start_ticks == process.get("start_ticks")

    def stop(self, process: Mapping[str, object]) -> None:
        """SIGTERM to the supervisor. A file descriptor holds the process, so no other one of its id can be hit."""
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(_pid(process))
            try:
                if self.is_alive(process):
                    signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            finally:
                os.close(descriptor)

    def outcome(self, directory: Path) -> Outcome | None:
        """What the supervisor wrote at the end."""
        return read_outcome(directory)

    def sweep(self, process: Mapping[str, object]) -> int:
        """Kills every process that carries the attempt's token in its environment, until none is left."""
        marker = f"{TOKEN_VARIABLE}={process['token']}".encode()
        killed: set[int] = set()
        deadline = time.monotonic() + _SWEEP_S
        while (found := _marked(marker)) and time.monotonic() < deadline:
            for pid in found:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            time.sleep(0.01)
        return len(killed)


def _marked(marker: bytes) -> list[int]:
    """The living processes with an environment entry of exactly this text."""
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes()  # empty for a process that has ended
        except OSError:
            continue  # ended meanwhile, or another user's
        if marker in environment.split(b"\0"):
            found.append(int(entry))
    return found


def _pid(process: Mapping[str, object]) -> int:
    pid = process["pid"]
    assert isinstance(pid, int)
    return pid


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
