"""Plays `gym train` for the daemon's tests: makes a run directory, writes events, and ends as the run's name says.

steps-N              N steps with a checkpoint each, then succeeds with an adapter
paced-MS-N           the same, MS milliseconds a step
waits                steps until the file `go` appears in the run's folder, then succeeds
workers              starts a worker with a session of its own, which starts another, and waits
stubborn             the same, and ignores SIGTERM
fails                exits with 1 and a message
mistaken             exits with 2 and a message
asks                 calls its student's endpoint for the list of models, then waits as `waits` does
learns               succeeds with a library of experiences
dies-once            kills itself after two steps; the resumed run succeeds
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from gym_data.experience import LIBRARY_FILE, MANIFEST_FILE, Experience, ExperienceLibrary, write_library
from gym_sdk.events import EventWriter, RunState
from gym_sdk.rundir import RunDir
from gym_sdk.spec import dump_yaml, load_spec

WORKER = """
import os, subprocess, sys, time
if len(sys.argv) < 3:
    subprocess.Popen([sys.executable, "-c", open(sys.argv[1]).read(), sys.argv[1], "leaf"], start_new_session=True)
with open(os.path.dirname(sys.argv[1]) + "/workers", "a") as file:
    file.write(f"{os.getpid()}\\n")
while True:
    time.sleep(3600)
"""


def main(arguments: list[str]) -> int:
    assert arguments[0] == "train"
    resumed = arguments[1] == "--resume"
    if resumed:
        run = RunDir.open(arguments[2])
        name = run.name
    else:
        spec = load_spec(arguments[1])
        name = spec.name
        run = RunDir.create(spec.output.dir, name)
        run.spec_path.write_text(dump_yaml(spec), encoding="utf-8")
    (run.path / "pid").write_text(str(os.getpid()), encoding="utf-8")
    (run.path / "environment.json").write_text(json.dumps(dict(os.environ)), encoding="utf-8")
    with EventWriter(run.events_path) as events:
        events.state(RunState.TRAINING)
        return play(name, run, events, resumed)


def play(name: str, run: RunDir, events: EventWriter, resumed: bool) -> int:
    if name == "fails":
        print("error: the loss was not a number at step 1", file=sys.stderr)
        return 1
    if name == "mistaken":
        print("error: rank is larger than the layer", file=sys.stderr)
        return 2
    if name == "learns":
        folder = run.experience_dir
        folder.mkdir()
        lesson = Experience(name="Check units", text="Convert both sides to one unit first.")
        write_library(ExperienceLibrary(items=(lesson,)), folder / LIBRARY_FILE)
        (folder / MANIFEST_FILE).write_text("{}", encoding="utf-8")
        events.artifact("experiences", "experience", 1)
        events.state(RunState.SUCCEEDED)
        return 0
    if name in ("workers", "stubborn"):
        if name == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        script = run.path / "worker.py"
        script.write_text(WORKER, encoding="utf-8")
        subprocess.Popen([sys.executable, "-c", WORKER, str(script)], start_new_session=True)
        step(run, events, 1)
        while True:
            time.sleep(3600)
    if name == "asks":
        endpoint = load_spec(run.spec_path).method.student.base_url
        answer = httpx.get(f"{endpoint}/models", headers={"authorization": f"Bearer {os.environ['GYM_API_KEY']}"})
        (run.path / "answer.json").write_bytes(answer.content)
        name = "waits"
    if name == "waits":
        number = len(list(run.checkpoints_dir.iterdir()))
        while not (run.path / "go").exists():
            number += 1
            step(run, events, number)
            time.sleep(0.02)
        return finish(run, events)
    if name == "dies-once" and not resumed:
        step(run, events, 1)
        step(run, events, 2)
        os.kill(os.getpid(), signal.SIGKILL)
    first = len(list(run.checkpoints_dir.iterdir())) + 1
    last = int(name.rpartition("-")[2]) if name.startswith(("steps-", "paced-")) else first + 1
    for number in range(first, last + 1):
        step(run, events, number)
        if name.startswith("paced-"):
            time.sleep(int(name.split("-")[1]) / 1000)
    return finish(run, events)


def step(run: RunDir, events: EventWriter, number: int) -> None:
    events.metric(number, {"loss": 1.0 / number})
    (run.checkpoints_dir / f"checkpoint-{number}").mkdir(exist_ok=True)
    events.checkpoint(number, f"checkpoints/checkpoint-{number}")


def finish(run: RunDir, events: EventWriter) -> int:
    run.adapter_dir.mkdir(exist_ok=True)
    source = os.environ.get("GYM_TEST_ADAPTER")
    for path in Path(source).iterdir() if source else ():
        (run.adapter_dir / path.name).write_bytes(path.read_bytes())
    events.artifact("adapter", "adapter", 1)
    events.state(RunState.SUCCEEDED)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
