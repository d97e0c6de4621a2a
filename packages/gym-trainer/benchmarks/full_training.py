"""Full fine-tuning in so much memory: where the plan lets weights move and states wait, predicted and measured.

    python packages/gym-trainer/benchmarks/full_training.py --run 8B:42.9:adamw --run 32B:110:adamw_8bit

Each run is SIZE:CAP_GB:OPTIMIZER, with `train.max_grad_norm: null`, and goes the way of `gym train`: plan, adapter,
fast path, loop. PyTorch is held to the cap. Weights and rows are random; no checkpoint is written.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from fitting import fit_steps, plain_rows, qwen3, random_model, run_spec

from gym_sdk.cli import console
from gym_sdk.errors import GymError
from gym_trainer.adapters import attach
from gym_trainer.loop.trainer import GymTrainer
from gym_trainer.objectives.sft import SftObjective
from gym_trainer.planning import DataShape, detect, plan
from gym_trainer.planning.hardware import hold_to


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="append", required=True, help="SIZE:CAP_GB:OPTIMIZER[:auto|on|off of offload]")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--compile", choices=["auto", "on", "off"], default="off")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    GymTrainer._save_checkpoint = lambda self, model, trial: None  # type: ignore[method-assign]
    detect("cuda")  # as `gym train` does it: before any weights are there
    for run in args.run:
        line = json.dumps({"run": run, "compile": args.compile} | _measure(run, args))
        console.out(line)
        if args.json:
            with args.json.open("a") as file:
                file.write(line + "\n")
        gc.collect()
        torch.cuda.empty_cache()
    return 0


def _measure(run: str, args: argparse.Namespace) -> dict[str, Any]:
    size, cap, optimizer, *rest = run.split(":")
    spec = run_spec(
        adapter={"kind": "full"},
        data={"train": [{"source": "random"}], "max_length": args.length},
        train={
            "batch_size": args.batch_size,
            "max_steps": args.steps,
            "max_grad_norm": None,
            "optimizer": optimizer,
            "learning_rate": 1e-5,
        },
        performance={
            "memory_limit_gb": float(cap),
            "compile": args.compile,
            "offload_optimizer": rest[0] if rest else "auto",
        },
    )
    tokens = args.batch_size * args.length
    data = DataShape(
        num_rows=args.batch_size, num_tokens=tokens, longest_row_tokens=args.length, longest_step_tokens=tokens
    )
    try:
        made = plan(spec, qwen3(size), detect("cuda"), data=data, compare=False)
    except GymError as error:
        return {"refused": error.message, "hint": error.hint}
    planned = {
        "micro_batch_tokens": made.micro_batch_tokens,
        "recompute_layers": made.recompute_layers,
        "optimizer_in_backward": made.optimizer_in_backward,
        "offload_optimizer": made.offload_optimizer,
        "compile": made.compile,
        "allocated_gib": made.memory.allocated / 2**30,
        "total_gib": made.memory.total / 2**30,
        "host_gib": made.memory.optimizer_in_host / 2**30,
        "tokens_per_s": made.speed.throughput_tokens_per_s,
    }
    hold_to(int(float(cap) * 1e9))
    start = time.perf_counter()
    model = attach(random_model(size), spec.adapter, seed=0).model
    made_s = time.perf_counter() - start
    try:
        rows = plain_rows([args.length] * args.batch_size)
        measured = fit_steps(model, spec, made, SftObjective(), rows, num_warm=args.warm)
    except (GymError, torch.OutOfMemoryError) as error:
        reached = torch.cuda.max_memory_allocated() / 2**30
        return {"planned": planned, "failed": str(error).splitlines()[0], "allocated_gib": reached}
    host_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"planned": planned, "made_s": made_s, "host_rss_gib": host_gib} | measured


if __name__ == "__main__":
    raise SystemExit(main())
