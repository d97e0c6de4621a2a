"""Seconds from the start of `gym train` to its first optimizer step, in fresh processes one after the other.

    python packages/gym-trainer/benchmarks/first_step.py --size 8B --tokenizer TOKENIZER_FOLDER --data rows.jsonl

The first process compiles what later ones find on disk. Random weights are written once, in the folder's own format, so
that they load as any model's do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from fitting import random_model

from gym_sdk.cli import console
from gym_sdk.events import LogEvent, MetricEvent, ProgressEvent, StateEvent, read_events
from gym_sdk.rundir import RunDir, find_runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="8B")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer files and a chat template")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "gym-bench-model")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    if not (args.folder / "config.json").exists():
        _write(args.size, args.tokenizer, args.folder)
    console.err(f"weights in {args.folder} after {time.perf_counter() - start:.1f} s")
    for number in range(args.processes):
        row = {"size": args.size, "process": number + 1} | _first_step(args.folder, args.data)
        console.out(json.dumps(row))
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 0


def _write(size: str, tokenizer: Path, folder: Path) -> None:
    model = random_model(size)
    model.save_pretrained(folder)
    for file in tokenizer.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder / file.name)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _first_step(model: Path, data: Path) -> dict[str, object]:
    """Wall time until the first step is logged, and when each stage began."""
    with tempfile.TemporaryDirectory() as folder:
        spec = {
            "name": "first-step",
            "model": {"source": str(model)},
            "data": {"train": [{"source": str(data.resolve())}]},
            "train": {"max_steps": 2, "batch_size": 32},
            "output": {"dir": folder},
        }
        path = Path(folder) / "run.yaml"
        path.write_text(json.dumps(spec))
        command = [
            sys.executable,
            "-c",
            "from gym_sdk.cli import main; raise SystemExit(main())",
            "train",
            str(path),
        ]
        begun = time.time()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            output, _ = process.communicate(timeout=300)
        finally:
            process.kill()
        runs = find_runs(Path(folder))
        if process.returncode or not runs:
            return {"failed": output[-2000:]}
        told = list(read_events(RunDir.open(runs[0]).events_path))
    moments = {"run made": told[0].time.timestamp() - begun}
    for event in told:
        if isinstance(event, StateEvent):
            moments.setdefault(
                f"state {event.state.name.lower()} {event.message}".strip(), event.time.timestamp() - begun
            )
        if isinstance(event, LogEvent):
            moments.setdefault(event.text[:60], event.time.timestamp() - begun)
        if isinstance(event, ProgressEvent):
            moments.setdefault(f"progress {event.stage}", event.time.timestamp() - begun)
    steps = [
        event.time.timestamp() - begun for event in told if isinstance(event, MetricEvent) and "loss" in event.values
    ]
    return {"first_step_s": steps[0], "second_step_s": steps[1], "moments_s": moments}


if __name__ == "__main__":
    raise SystemExit(main())
