"""Run by an interpreter that has TRL: prepares a file as `SFTTrainer` does, and writes what came of it.

python _trl_script.py MODEL_FOLDER FILE OUT MAX_LENGTH
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    folder, file, out, max_length = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    import numpy as np
    import torch
    import trl
    from datasets import Dataset, disable_progress_bars, load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    disable_progress_bars()
    start = time.process_time()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer_cpu_s = time.process_time() - start
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config)
    args = trl.SFTConfig(
        output_dir=str(out / "trainer"),
        assistant_only_loss=True,
        max_length=max_length,
        use_cpu=True,
        bf16=False,
        report_to="none",
        dataset_num_proc=None,
    )
    # The trainer wants rows before it can prepare any.
    few = Dataset.from_list([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}])
    trainer = trl.SFTTrainer(model=model, args=args, train_dataset=few, processing_class=tokenizer)
    start = time.process_time()
    rows = load_dataset("json", data_files=file, split="train", cache_dir=str(out / "cache"))
    prepared = trainer._prepare_dataset(rows, tokenizer, args, False, None, "train")
    cpu_s = time.process_time() - start
    ids = prepared["input_ids"]
    masks = [[label != -100 for label in row] for row in prepared["labels"]]
    np.savez(
        out / "rows.npz",
        ids=np.concatenate([np.asarray(row, np.uint32) for row in ids]),
        mask=np.concatenate([np.asarray(row, np.uint8) for row in masks]),
        lengths=np.array([len(row) for row in ids]),
    )
    (out / "found.json").write_text(json.dumps({"cpu_s": tokenizer_cpu_s + cpu_s, "version": trl.__version__}))


if __name__ == "__main__":
    main()
