"""Run by an interpreter that has TRL: trains documents with `SFTTrainer` and times its steps.

python _trl_script.py SETTINGS.json OUT.json

Rows are sorted by length, so that batches have as little padding as they can; labels are given, so that the same tokens
are trained. `ways` of the settings are tried one after another; the fastest is TRL's best.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> None:
    settings, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    import trl  # before torch, which takes seconds to come where there is none of it
    import torch  # isort: skip

    if settings["num_threads"]:
        torch.set_num_threads(settings["num_threads"])
    found: dict[str, Any] = {"version": trl.__version__, "rows": [], "failures": {}}
    for way in settings["ways"]:
        try:
            found["rows"].append({"name": way["name"]} | measure(settings, way))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the row's result
            found["failures"][way["name"]] = (str(error).splitlines() or [type(error).__name__])[0]
        out.write_text(json.dumps(found))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure(settings: dict[str, Any], way: dict[str, Any]) -> dict[str, Any]:
    import torch
    from datasets import Dataset, disable_progress_bars
    from torch.utils.data import SequentialSampler
    from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    dtype = getattr(torch, way["dtype"])
    on_cpu = settings["device"] == "cpu"
    config = AutoConfig.for_model(**settings["config"])
    torch.manual_seed(0)
    with torch.device(settings["device"]):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    num_steps, num_warm_steps = settings["num_steps"], settings["num_warm_steps"]
    rows = sorted(settings["rows"], key=lambda row: len(row["input_ids"]))
    adapter = None
    if settings["rank"]:
        from peft import LoraConfig

        adapter = LoraConfig(r=settings["rank"], lora_alpha=2 * settings["rank"], target_modules="all-linear")

    class Ordered(SFTTrainer):  # pyright: ignore[reportUntypedBaseClass] - of the other interpreter
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []
            self.losses: list[float] = []

        def _now(self) -> None:
            if not on_cpu:
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self.times:
                self._now()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._now()
            if len(self.times) == num_warm_steps + 1 and not on_cpu:
                torch.cuda.reset_peak_memory_stats()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                self.losses.append(logs["loss"])

    clock = Clock()
    at_once = way["rows_at_once"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=len(rows) // at_once,
            max_steps=num_warm_steps + num_steps,
            learning_rate=settings["learning_rate"],
            lr_scheduler_type="constant",
            bf16=way["dtype"] == "bfloat16",
            use_cpu=on_cpu,
            gradient_checkpointing=way["recompute"],
            padding_free=way["padding_free"],
            use_liger_kernel=way["liger"],
            max_length=None,
            optim="adamw_torch_fused",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        trainer = Ordered(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=_tokenizer(settings["config"]["vocab_size"]),
            peft_config=adapter,
            callbacks=[clock],
        )
        trainer.train()
    times = clock.times
    return {
        "step_time_s": (times[-1] - times[num_warm_steps]) / num_steps,
        "first_steps_s": times[num_warm_steps] - times[0],
        "peak_memory_bytes": 0 if on_cpu else torch.cuda.max_memory_allocated(),
        "loss": clock.losses[-1],
        "first_loss": clock.losses[0],
    }


def _tokenizer(vocab_size: int) -> Any:
    """The trainer wants one; rows are token ids already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


if __name__ == "__main__":
    main()
