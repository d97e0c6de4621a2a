"""Jobs on a Slurm cluster, through its own commands: sbatch, squeue, scancel.

An attempt is a batch job on one node, whose script becomes the supervisor that local jobs have, too. The data
directory and this Python must be found under the same paths on the nodes.

- Nothing runs that a restarted daemon would not find: the script waits for a file of its own, which the daemon writes
  after it has written down the job's number, and gives up without it.
- Slurm may end a job by itself: a time limit, a preemption, a lost node. The file `stop` says that the daemon wanted
  the end; without it the end is an interruption, and the job goes on from its last checkpoint in another attempt.
- On a shared file system the end of a job may be read some time after it has left the queue. Until then it counts as
  running.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gym_sdk.errors import GymError, UserError
from gym_serve.jobs.supervisor import EXIT_FILE
from gym_serve.launchers.base import TOKEN_VARIABLE, Launch, Outcome, read_outcome

_LOOK_EVERY_S = 2.0
"""How old the list of the queue may be: squeue is asked once for all jobs, and clusters limit how often."""
_COMMAND_S = 60.0
_GO_S = 120
_WARNING_S = 60
"""How long before a time limit, beyond the grace time, the job is asked to stop."""


class SlurmLauncher:
    """See the module. Every method may wait for Slurm, and is called in a thread."""

    def __init__(self, options: Sequence[str] = (), *, settle_s: float) -> None:
        """`options` go to every sbatch (partition, account, time limit). `settle_s` is how long after a job's end its
        files may need to be seen here. Raises UserError where Slurm's commands are not installed."""
        for command in ("sbatch", "squeue", "scancel"):
            if shutil.which(command) is None:
                raise UserError(
                    f"jobs.launcher is 'slurm', and there is no {command} on the daemon's PATH",
                    hint="run the daemon on a login node of the cluster, or set jobs.launcher = 'local'",
                )
        self._options = tuple(options)
        self._settle_s = settle_s
        self._lock = threading.Lock()
        self._queue: frozenset[str] = frozenset()
        self._looked_at = float("-inf")
        self._gone_since: dict[str, float] = {}

    def start(self, launch: Launch, record: Callable[[dict[str, object]], None]) -> None:
        """Submits the batch job, has its number recorded, then lets it begin."""
        directory = launch.directory
        directory.mkdir(parents=True, exist_ok=True)
        script = directory / "job.sh"
        with open(os.open(script, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(_script(launch))  # it may hold a key
        said = _run("sbatch", "--parsable", *self._options, *_options(launch), str(script))
        number = said.strip().partition(";")[0]  # `number` or `number;cluster`
        if not number.isdigit():
            raise GymError(f"sbatch answered '{said.strip()[:200]}', which is no job's number")
        try:
            record({"slurm_job": number, "directory": str(directory), "token": launch.token})
        except BaseException:
            _run("scancel", number)
            raise
        with self._lock:
            self._looked_at = float("-inf")  # the list that is known does not have it
        _go(launch).write_text("go\n", encoding="ascii")

    def is_alive(self, process: Mapping[str, object]) -> bool:
        """Whether the job waits or runs in Slurm, or ended so recently that its end may not be seen here yet."""
        number, directory = str(process["slurm_job"]), Path(str(process["directory"]))
        if number in self._look():
            self._gone_since.pop(number, None)
            return True
        if EXIT_FILE in os.listdir(directory) or (directory / "stop").exists():
            return False
        gone_since = self._gone_since.setdefault(number, time.monotonic())
        return time.monotonic() - gone_since < self._settle_s

    def stop(self, process: Mapping[str, object]) -> None:
        """Takes a waiting job out of the queue; the supervisor of a running one gets SIGTERM."""
        (Path(str(process["directory"])) / "stop").touch()
        number = str(process["slurm_job"])
        _run("scancel", "--quiet", "--state=PENDING", number, may_fail=True)
        _run("scancel", "--quiet", "--batch", "--signal=TERM", number, may_fail=True)

    def outcome(self, directory: Path) -> Outcome | None:
        """What the supervisor wrote at the end."""
        outcome = read_outcome(directory)
        if outcome is None or not outcome.stopped or (directory / "stop").exists():
            return outcome
        # Asked to stop, but not by the daemon; whatever the job then ended with, it had not come to its end.
        return replace(outcome, exit_code=None, signal=outcome.signal or 15, stopped=False)

    def sweep(self, process: Mapping[str, object]) -> int:
        """Has Slurm end what may be left of a lost attempt; it knows the processes of its jobs itself."""
        _run("scancel", "--quiet", str(process["slurm_job"]), may_fail=True)
        return 0

    def _look(self) -> frozenset[str]:
        """The numbers of this user's jobs that wait or run. Raises GymError when Slurm does not answer: nothing is
        known then, least of all that a job has ended."""
        with self._lock:
            if time.monotonic() - self._looked_at > _LOOK_EVERY_S:
                self._queue = frozenset(_run("squeue", "--noheader", "--me", "--format=%A").split())
                self._looked_at = time.monotonic()
            return self._queue


def _options(launch: Launch) -> list[str]:
    return [
        f"--job-name=gym-{launch.directory.parent.name}",
        f"--chdir={launch.working_directory}",
        f"--output={launch.directory / 'slurm.log'}",
        "--nodes=1",
        "--ntasks=1",
        *([f"--gpus-per-node={launch.num_gpus}"] if launch.num_gpus else []),
        "--export=NIL",  # nothing of the daemon's environment
        "--no-requeue",  # the daemon starts it again itself, from its last checkpoint
        f"--signal=B:TERM@{round(launch.grace_s) + _WARNING_S}",
    ]


def _go(launch: Launch) -> Path:
    # By the token: what another start of the same attempt left in the queue must not take this one's word for its own.
    return launch.directory / f"go-{launch.token}"


def _script(launch: Launch) -> str:
    # Which GPUs the job has is Slurm's to say; a job without one must not see the node's.
    environment = {
        name: value
        for name, value in {**launch.environment, TOKEN_VARIABLE: launch.token}.items()
        if name != "CUDA_VISIBLE_DEVICES" or not launch.num_gpus
    }
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    go = shlex.quote(str(_go(launch)))
    supervisor = [
        *(sys.executable, "-m", "gym_serve.jobs.supervisor"),
        *(str(launch.directory), str(launch.output), str(launch.grace_s), "--", *launch.command),
    ]
    lines = [
        "#!/bin/sh",
        *exports,
        "n=0",
        f'until [ -s {go} ]; do n=$((n + 1)); [ "$n" -gt {_GO_S} ] && exit 0; sleep 1; done',
        f"exec {shlex.join(supervisor)} < {go}",
    ]
    return "\n".join(lines) + "\n"


def _run(*command: str, may_fail: bool = False) -> str:
    """What one of Slurm's commands prints. Raises GymError with its own words."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise GymError(f"{command[0]} did not answer in {_COMMAND_S:.0f} s") from None
    if done.returncode != 0 and not may_fail:
        raise GymError(done.stderr.strip()[-500:] or f"{command[0]} ended with exit code {done.returncode}")
    return done.stdout
