"""DPO on ragged pairs: Gym beside TRL's DPOTrainer, on the same pairs from the same adapter.

    python packages/gym-trainer/benchmarks/preference.py --size 8B --lengths lengths.json --num-pairs 32

`lengths.json` is a list of `[prompt, answer]` in tokens; a pair's rejected answer is as long as the next row's. Every
step sees all pairs, so that the losses of a step can be compared, whatever the order within it. TRL gets the tokens as
they are, its rows sorted by length within a step, so that it pads as little as it can. The adapter begins away from
zero, so that the first step's loss says something; `--float32` adds what it is without rounding.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fitting import Groups, fit_steps, pairs, qwen3, random_model, run_spec
from peft import LoraConfig
from transformers import PreTrainedTokenizerFast, TrainerCallback

from gym_data import Document
from gym_sdk.cli import console
from gym_sdk.spec import RunSpec, spec_from_data
from gym_trainer.adapters import attach
from gym_trainer.loop.batch import StoreRows
from gym_trainer.objectives.dpo import DpoObjective
from gym_trainer.objectives.reference import AdapterDisabled, Precomputed, Reference
from gym_trainer.planning import DataShape, detect, plan

_RANK = 16
_BETA = 0.1
_LEARNING_RATE = 2e-5
_MOVED = 5e-3
"""Standard deviation of B at the start."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="8B")
    parser.add_argument("--lengths", type=Path, required=True)
    parser.add_argument("--num-pairs", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--trl-batches", nargs="*", type=int, default=[8, 16], help="pairs of a TRL micro-batch")
    parser.add_argument("--liger", choices=["on", "off", "both"], default="both", help="of TRL's rows")
    parser.add_argument("--apart", action="store_true", help="Gym without shared prompts, too")
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json: TRL wants one, and never uses it")
    parser.add_argument("--float32", action="store_true", help="the same weights in float32, for the losses")
    parser.add_argument("--recomputed", action="store_true", help="TRL's default too, which recomputes every layer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    detect("cuda")
    made = pairs([tuple(row) for row in json.loads(args.lengths.read_text())[: args.num_pairs]])
    spec = run_spec(
        method={"kind": "dpo", "beta": _BETA},
        train={"batch_size": len(made), "max_steps": args.steps, "learning_rate": _LEARNING_RATE, "weight_decay": 0.0},
    )
    num_tokens = sum(len(document.ids) for pair in made for document in pair)
    base = random_model(args.size)
    model = attach(base, spec.adapter, seed=0).model
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for name, weight in start.items():
        if "lora_B" in name:
            weight.normal_(std=_MOVED)

    def report(name: str, measure: Callable[[], dict[str, Any]]) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        try:
            row = {"name": name, "size": args.size, "num_tokens": num_tokens} | measure()
        except Exception as error:  # noqa: BLE001 - one way that fails must not cost the others
            row = {
                "name": name,
                "failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            }
        line = json.dumps(row)
        console.out(line)
        if args.json:
            with args.json.open("a") as file:
                file.write(line + "\n")

    for name, reference in (("in the step", AdapterDisabled()), ("before training", Precomputed())):
        for shared in (True, False) if args.apart else (True,):
            report(
                f"gym, reference {name}{', each prompt twice' * (not shared)}",
                lambda reference=reference, shared=shared: _gym(model, spec, args, made, start, reference, shared),
            )
    if args.float32:
        report("gym, float32", lambda: _gym(model.float(), spec, args, made, start, AdapterDisabled(), True))
        model.to(torch.bfloat16)
    base = model.unload()
    for liger in {"on": (True,), "off": (False,), "both": (False, True)}[args.liger]:
        for size in args.trl_batches:
            for precompute in (False, True):
                options: dict[str, Any] = {"batch": size, "liger": liger, "precompute": precompute}
                name = f"trl, {'Liger, ' * liger}{size} pairs at once, reference {'before' if precompute else 'in'}"
                report(name, lambda options=options: _trl(base, args, made, start, **options))
        if args.recomputed:
            options = {"batch": max(args.trl_batches), "liger": liger, "precompute": False, "recompute": True}
            name = f"trl, {'Liger, ' * liger}{max(args.trl_batches)} pairs at once, every layer recomputed"
            report(name, lambda options=options: _trl(base, args, made, start, **options))
    return 0


def _gym(
    model: Any,
    spec: RunSpec,
    args: argparse.Namespace,
    made: list[tuple[Document, Document]],
    start: dict[str, torch.Tensor],
    reference: Reference,
    shared: bool,
) -> dict[str, Any]:
    _restore(model, start)
    rows = StoreRows(Groups(made))  # type: ignore[arg-type]
    data = DataShape(
        num_rows=len(rows),
        num_tokens=int(rows.lengths_N.sum()),
        longest_row_tokens=int(rows.lengths_N.max()),
        shared_tokens=sum(sum(rows.row(number).prefix_lengths()) for number in range(len(rows))) if shared else 0,
    )
    if model.dtype == torch.float32:
        exact = {"model": {"source": "random", "dtype": "float32"}, "performance": {"fused": "off", "compile": "off"}}
        spec = spec_from_data(spec.model_dump(mode="json") | exact)
    if isinstance(reference, Precomputed):
        spec = spec_from_data(
            spec.model_dump(mode="json") | {"method": {"kind": "dpo", "beta": _BETA, "reference": "precomputed"}}
        )
    chosen = plan(spec, qwen3(args.size), detect("cuda"), data=data, compare=False)
    objective = DpoObjective(spec.method, reference)  # type: ignore[arg-type]
    measured = fit_steps(model, spec, chosen, objective, rows, num_warm=args.warm)
    return measured | {
        "shared_tokens": data.shared_tokens,
        "planned_tokens_per_s": chosen.speed.throughput_tokens_per_s,
        "planned_gib": chosen.memory.allocated / 2**30,
    }


def _trl(
    base: Any,
    args: argparse.Namespace,
    made: list[tuple[Document, Document]],
    start: dict[str, torch.Tensor],
    *,
    batch: int,
    liger: bool,
    precompute: bool,
    recompute: bool = False,
) -> dict[str, Any]:
    import tempfile

    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer
    from trl.trainer import dpo_trainer

    base.gradient_checkpointing_disable()
    # of 16 GB, for the name of a cache that is not used here
    dpo_trainer.hash_module = lambda module: "model"
    by_length = sorted(made, key=lambda pair: max(len(document.ids) for document in pair))
    rows = [
        {
            "prompt_ids": _split(chosen)[0],
            "chosen_ids": _split(chosen)[1],
            "rejected_ids": _split(rejected)[1],
        }
        for chosen, rejected in by_length
    ]

    class OnTokens(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self._since = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self._since = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self._since)

    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(
            output_dir=folder,
            per_device_train_batch_size=batch,
            precompute_ref_batch_size=batch,
            gradient_accumulation_steps=len(made) // batch,
            max_steps=args.steps,
            learning_rate=_LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            beta=_BETA,
            max_length=None,
            bf16=True,
            gradient_checkpointing=recompute,
            use_liger_kernel=liger,
            precompute_ref_log_probs=precompute,
            train_sampling_strategy="sequential",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        clock = Clock()
        torch.cuda.reset_peak_memory_stats()
        trainer = OnTokens(
            model=base,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=_tokenizer(args.tokenizer),
            peft_config=LoraConfig(r=_RANK, lora_alpha=2 * _RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[clock],
        )
        try:
            _restore(trainer.model, start)
            trainer.train()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        finally:
            trainer.model.unload()
    seconds = clock.seconds[args.warm :]
    num_tokens = sum(len(document.ids) for pair in made for document in pair)
    return {
        "tokens_per_s": num_tokens * len(seconds) / sum(seconds),
        "step_s": sum(seconds) / len(seconds),
        "all_steps_s": clock.seconds,
        "losses": losses,
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def _tokenizer(folder: Path | None) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    if folder is not None:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    else:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>"))
        )
    tokenizer.pad_token, tokenizer.eos_token = ("<pad>", "<eos>") if folder is None else ("<|im_end|>", "<|im_end|>")
    return tokenizer


def _split(document: Document) -> tuple[list[int], list[int]]:
    start = int(document.loss_mask.argmax())
    ids = document.ids.tolist()
    return ids[:start], ids[start:]


@torch.no_grad()
def _restore(model: Any, start: dict[str, torch.Tensor]) -> None:
    """The adapter as it was first; its names end alike in every wrapper."""
    current = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if sorted(current) != sorted(start):
        raise ValueError(f"trained weights have other names: {sorted(current)[0]}, {sorted(start)[0]}")
    for name, parameter in current.items():
        parameter.copy_(start[name])


if __name__ == "__main__":
    raise SystemExit(main())
