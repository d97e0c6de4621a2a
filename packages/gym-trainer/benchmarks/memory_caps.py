"""What the plan chooses in so much memory, held to it: predicted and measured, beside other micro-batches.

    python packages/gym-trainer/benchmarks/memory_caps.py --sizes 0.6B 1.7B 8B --caps 12 16 24 40 141 --json caps.jsonl

Each run goes the way of `gym train`: plan, adapter, fast path, loop. PyTorch is held to the cap (GB of 10^9 bytes), so
that a plan that asks for too little fails. Weights and rows are random.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from fitting import fit_steps, plain_rows, qwen3, random_model, run_spec

from gym_sdk.cli import console
from gym_sdk.errors import GymError
from gym_sdk.spec import RunSpec
from gym_trainer.adapters import attach
from gym_trainer.objectives.sft import SftObjective
from gym_trainer.planning import DataShape, Plan, detect, plan
from gym_trainer.planning.hardware import hold_to


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["0.6B", "1.7B", "8B"])
    parser.add_argument("--caps", nargs="+", type=float, default=[12, 16, 24, 40, 141])
    parser.add_argument("--micro-batches", nargs="*", type=int, default=[2048, 4096, 8192, 16384], help="of the sweep")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--recompute-layers", type=int, help="instead of the plan's choice")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    detect("cuda")  # as `gym train` does it: before any weights are there
    for size in args.sizes:
        hold_to(2**50)
        start = time.perf_counter()
        model = attach(random_model(size), run_spec().adapter, seed=0).model
        torch.cuda.synchronize()
        console.err(f"{size}: made in {time.perf_counter() - start:.1f} s")
        done: dict[tuple[Any, ...], dict[str, Any]] = {}
        for cap in args.caps:
            refused = False
            for micro_batch in (None, *args.micro_batches):
                if refused:
                    break
                row = {"size": size, "cap_gb": cap, "asked_micro_batch": micro_batch}
                row |= _measure(model, size, cap, micro_batch, args, done)
                refused = refused or (micro_batch is None and "refused" in row)
                line = json.dumps(row)
                console.out(line)
                if args.json:
                    with args.json.open("a") as file:
                        file.write(line + "\n")
        del model
        torch.cuda.empty_cache()
    return 0


def _measure(
    model: Any, size: str, cap: float, micro_batch: int | None, args: argparse.Namespace, done: dict[Any, Any]
) -> dict[str, Any]:
    spec = run_spec(
        data={"train": [{"source": "random"}], "max_length": args.length},
        train={"batch_size": args.batch_size, "max_steps": args.steps, "micro_batch_tokens": micro_batch},
        performance={
            "memory_limit_gb": cap,
            "recompute_layers": "auto" if args.recompute_layers is None else args.recompute_layers,
        },
    )
    start = time.perf_counter()
    try:
        made = _plan(spec, size, args)
    except GymError as error:
        return {"refused": error.message, "hint": error.hint}
    facts = {
        "plan_s": time.perf_counter() - start,
        "planned": {
            "micro_batch_tokens": made.micro_batch_tokens,
            "recompute_layers": made.recompute_layers,
            "offload": made.offload,
            "loss_chunk_size": made.loss_chunk_size,
            "allocated_gib": made.memory.allocated / 2**30,
            "total_gib": made.memory.total / 2**30,
            "tokens_per_s": made.speed.throughput_tokens_per_s,
        },
    }
    chosen = (made.micro_batch_tokens, made.recompute_layers, made.offload, made.loss_chunk_size)
    if chosen in done:  # measured under a smaller cap already
        return facts | {"same_as_before": True} | done[chosen]
    hold_to(int(cap * 1e9))
    rows = plain_rows([args.length] * args.batch_size)
    try:
        measured = fit_steps(model, spec, made, SftObjective(), rows, num_warm=args.warm)
    except (GymError, torch.OutOfMemoryError) as error:
        reached = torch.cuda.max_memory_allocated() / 2**30
        return facts | {"failed": str(error).splitlines()[0], "allocated_gib": reached}
    done[chosen] = measured
    return facts | measured


def _plan(spec: RunSpec, size: str, args: argparse.Namespace) -> Plan:
    data = DataShape(num_rows=args.batch_size, num_tokens=args.batch_size * args.length, longest_row_tokens=args.length)
    return plan(spec, qwen3(size), detect("cuda"), data=data, compare=False)


if __name__ == "__main__":
    raise SystemExit(main())
