"""One process above each job, which ends everything that the job started. Standard library only, so it starts at once.

`python -m gym_serve.jobs.supervisor DIRECTORY OUTPUT GRACE_S -- COMMAND...`

- It outlives the daemon: a session of its own, no pipe to the daemon once it has begun.
- It starts nothing before it reads `go` on its standard input. The daemon sends that after it has written down the
  supervisor's process id and start time, so no job can run that a restarted daemon would not find. If the daemon dies
  first, the input ends and the supervisor leaves.
- It is a child subreaper (Linux, prctl 36): torchrun's workers lead sessions of their own, and killing a process
  group would miss them, but orphaned descendants become children of the nearest subreaper. When the command has
  ended, or was stopped, every remaining descendant is killed and reaped.
- SIGTERM stops the job: the command gets SIGTERM, and SIGKILL with all its descendants after the grace time.
- If the supervisor itself is killed, the command is killed with it by the kernel (prctl 1, PDEATHSIG).
- The end is written to `exit.json`, complete or not there.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

EXIT_FILE = "exit.json"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_HANDLED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def descendants(root: int) -> set[int]:
    """The processes below `root`, by one pass over /proc. Zombies are left out: they only wait to be reaped."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := read_stat(int(entry))) is not None and stat.state != "Z":
            children.setdefault(stat.parent, []).append(int(entry))
    found: set[int] = set()
    frontier = [root]
    while frontier:
        for child in children.get(frontier.pop(), ()):
            if child not in found:
                found.add(child)
                frontier.append(child)
    return found


class Stat:
    """What tells processes apart in /proc/<pid>/stat: state, parent, and start time in clock ticks since boot."""

    __slots__ = ("parent", "start_ticks", "state")

    def __init__(self, state: str, parent: int, start_ticks: int) -> None:
        self.state: str = state
        self.parent: int = parent
        self.start_ticks: int = start_ticks


def read_stat(pid: int) -> Stat | None:
    """What /proc says of a process; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name stands in parentheses and may hold anything, also parentheses.
    fields = text.rpartition(")")[2].split()
    return Stat(fields[0], int(fields[1]), int(fields[19]))


def main(arguments: list[str]) -> int:
    """Waits for `go`, runs the command to its end, leaves no descendant, and writes the exit file."""
    directory, output_path, grace_s, command = Path(arguments[0]), arguments[1], float(arguments[2]), arguments[4:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    if sys.stdin.buffer.readline() != b"go\n":
        return 0
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)

    def prepare_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())

    started_at = time.time()
    with open(output_path, "ab") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=prepare_child,
            )
        except OSError as error:
            output.write(f"{command[0]}: {error.strerror}\n".encode())
            _write_exit(directory, started_at, status=127 << 8, stopped=False, num_killed=0)
            return 0
    status, stopped = _wait(process.pid, grace_s)
    num_killed = _end_descendants()
    _write_exit(directory, started_at, status, stopped, num_killed)
    return 0


def _wait(pid: int, grace_s: float) -> tuple[int, bool]:
    """The command's wait status, and whether it was asked to stop. Orphans that end meanwhile are reaped."""
    deadline: float | None = None
    while True:
        while True:
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                raise AssertionError("the command was reaped elsewhere") from None
            if ended == pid:
                return status, deadline is not None
            if ended == 0:
                break
        timeout_s = 3600.0 if deadline is None else deadline - time.monotonic()
        received = signal.sigtimedwait(_HANDLED, max(timeout_s, 0.01))
        if received is not None and received.si_signo != signal.SIGCHLD and deadline is None:
            deadline = time.monotonic() + grace_s
            os.kill(pid, signal.SIGTERM)
        if deadline is not None and time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)


def _end_descendants() -> int:
    """Kills until nothing is left: who loses a parent comes to this process. Returns how many were killed."""
    killed: set[int] = set()
    while True:
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            except ProcessLookupError:
                pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return len(killed)


def _write_exit(directory: Path, started_at: float, status: int, stopped: bool, num_killed: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    record = {
        "exit_code": code if code >= 0 else None,
        "signal": -code if code < 0 else None,
        "stopped": stopped,
        "num_killed": num_killed,
        "started_at": started_at,
        "finished_at": time.time(),
    }
    temporary = directory / f".{EXIT_FILE}"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / EXIT_FILE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
