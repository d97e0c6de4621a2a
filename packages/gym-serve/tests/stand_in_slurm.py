"""Plays sbatch, squeue and scancel for the daemon's tests, as far as the daemon uses them; any other option is refused.

Installed under those names by `install`. The queue is a folder, `STAND_IN_SLURM`: jobs wait while it has a file `busy`,
sbatch refuses while it has `closed`, and squeue does not answer while it has `down`. `calls` has every command line.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

SBATCH = re.compile(
    r"--(parsable|partition=\w+|job-name=gym-[\w-]+|chdir=/.+|output=/.+|nodes=1|ntasks=1|gpus-per-node=\d+|export=NIL"
    r"|no-requeue|signal=B:TERM@\d+)"
)


def install(folder: Path) -> dict[str, str]:
    """The three commands in a folder of their own; what must be in the environment for them."""
    commands, queue = folder / "bin", folder / "queue"
    commands.mkdir(parents=True)
    queue.mkdir()
    for name in ("sbatch", "squeue", "scancel"):
        path = commands / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n', encoding="utf-8")
        path.chmod(0o755)
    return {"PATH": f"{commands}:{os.environ['PATH']}", "STAND_IN_SLURM": str(queue)}


def sbatch(queue: Path, options: list[str]) -> int:
    *flags, script = options
    wrong = [flag for flag in flags if not SBATCH.fullmatch(flag)]
    if wrong:
        return fail(f"sbatch: unrecognized option '{wrong[0]}'")
    if (queue / "closed").exists():
        return fail("sbatch: error: Batch job submission failed: Invalid account or account/partition combination")
    values = dict(flag[2:].split("=", 1) for flag in flags if "=" in flag)
    number = str(1 + len(list(queue.glob("*.json"))))
    content = Path(script).read_text(encoding="utf-8")  # Slurm takes its own copy
    (queue / f"{number}.json").write_text(json.dumps({"options": values, "script": content}), encoding="utf-8")
    (queue / f"{number}.state").write_text("PENDING", encoding="utf-8")
    subprocess.Popen(
        [sys.executable, __file__, "node", number],
        env={"STAND_IN_SLURM": str(queue), "PATH": "/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    print(f"{number};cluster" if "--parsable" in flags else f"Submitted batch job {number}")
    return 0


def node(queue: Path, number: str) -> int:
    """What slurmd does with a job: its script in a session of its own, and nothing left of it afterwards."""
    state, job = queue / f"{number}.state", json.loads((queue / f"{number}.json").read_text(encoding="utf-8"))
    while (queue / "busy").exists() and state.exists():
        time.sleep(0.02)
    if not state.exists():
        return 0  # cancelled while it waited
    options = job["options"]
    gpus = {"CUDA_VISIBLE_DEVICES": "5"} if "gpus-per-node" in options else {}
    script = queue / f"{number}.sh"
    script.write_text(job["script"], encoding="utf-8")
    with open(options["output"], "ab") as output:
        process = subprocess.Popen(
            ["/bin/sh", str(script)],
            cwd=options["chdir"],
            env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": number, **gpus},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    (queue / f"{number}.pid").write_text(str(process.pid), encoding="utf-8")
    state.write_text("RUNNING", encoding="utf-8")
    process.wait()
    state.unlink(missing_ok=True)
    return 0


def squeue(queue: Path, options: list[str]) -> int:
    if options != ["--noheader", "--me", "--format=%A"]:
        return fail(f"squeue: unrecognized options {options}")
    if (queue / "down").exists():
        return fail("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    print("\n".join(path.stem for path in queue.glob("*.state")))
    return 0


def scancel(queue: Path, options: list[str]) -> int:
    *flags, number = options
    state = queue / f"{number}.state"
    if not state.exists():
        return fail(f"scancel: error: Kill job error on job id {number}: Invalid job id specified")
    running = state.read_text(encoding="utf-8") == "RUNNING"
    if "--state=PENDING" in flags:
        if not running:
            state.unlink()
    elif "--batch" in flags:
        if running:
            os.kill(int((queue / f"{number}.pid").read_text(encoding="utf-8")), signal.SIGTERM)
    elif running:
        os.killpg(int((queue / f"{number}.pid").read_text(encoding="utf-8")), signal.SIGKILL)
    else:
        state.unlink()
    return 0


def fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    folder = Path(os.environ["STAND_IN_SLURM"])
    name, arguments = sys.argv[1], sys.argv[2:]
    with (folder / "calls").open("a", encoding="utf-8") as calls:
        calls.write(f"{name} {' '.join(arguments)}\n")
    if name == "node":
        sys.exit(node(folder, arguments[0]))
    sys.exit({"sbatch": sbatch, "squeue": squeue, "scancel": scancel}[name](folder, arguments))
