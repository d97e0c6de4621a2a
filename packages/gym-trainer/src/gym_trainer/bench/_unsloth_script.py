"""Run by an interpreter that has Unsloth: trains a folder's model with LoRA as its documentation says, and times it.

python _unsloth_script.py SETTINGS.json FOLDER OUT.json

Its two ways: recomputing every layer with activations offloaded, which is its default, and recomputing nothing.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    settings, folder, out = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2], Path(sys.argv[3])
    import unsloth  # before the libraries that it changes
    from unsloth import FastLanguageModel

    found: dict[str, Any] = {"version": unsloth.__version__, "rows": [], "failures": {}}
    for name, recompute in (("nothing recomputed", False), ("its default recomputation", "unsloth")):
        for rows_at_once in settings["rows_at_once"]:
            label = f"unsloth, {name}, {rows_at_once} rows at once"
            try:
                found["rows"].append(
                    {"name": label} | measure(FastLanguageModel, settings, folder, recompute, rows_at_once)
                )
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the row's result
                found["failures"][label] = (str(error).splitlines() or [type(error).__name__])[0]
            out.write_text(json.dumps(found))
            free()


def free() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def measure(fast: Any, settings: dict[str, Any], folder: str, recompute: Any, rows_at_once: int) -> dict[str, Any]:
    import torch

    longest_row = max(len(row["input_ids"]) for row in settings["rows"])
    model, _ = fast.from_pretrained(
        model_name=folder, max_seq_length=longest_row, dtype=torch.bfloat16, load_in_4bit=False
    )
    model = fast.get_peft_model(
        model,
        r=settings["rank"],
        lora_alpha=2 * settings["rank"],
        lora_dropout=0,
        bias="none",
        target_modules=TARGETS,
        use_gradient_checkpointing=recompute,
        random_state=0,
        max_seq_length=longest_row,
    )
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    batches = []
    rows = sorted(settings["rows"], key=lambda row: len(row["input_ids"]))
    for start in range(0, len(rows), rows_at_once):
        part = rows[start : start + rows_at_once]
        longest = max(len(row["input_ids"]) for row in part)
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        labels = torch.full_like(ids, -100)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(part):
            length = len(row["input_ids"])
            ids[number, :length] = torch.tensor(row["input_ids"])
            labels[number, :length] = torch.tensor(row["labels"])
            mask[number, :length] = 1
        batches.append([tensor.cuda() for tensor in (ids, mask, labels)])

    def steps(count: int) -> float:
        loss = torch.zeros(())
        for _ in range(count):
            for ids, mask, labels in batches:
                with torch.autocast("cuda", torch.bfloat16):
                    inputs = {} if bool((mask == 1).all()) else {"attention_mask": mask}
                    loss = model(input_ids=ids, labels=labels, **inputs).loss / len(batches)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return float(loss.detach())

    start = time.perf_counter()
    steps(settings["num_warm_steps"])
    first_s = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    loss = steps(settings["num_steps"])
    step_s = (time.perf_counter() - start) / settings["num_steps"]
    return {
        "step_time_s": step_s,
        "first_steps_s": first_s,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(),
        "loss": loss,
    }


if __name__ == "__main__":
    main()
