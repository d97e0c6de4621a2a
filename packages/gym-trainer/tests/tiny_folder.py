"""A tiny model folder in Hugging Face layout, made on the spot: byte-level tokenizer, ChatML, random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_tiny_folder(folder: Path, *, tied: bool = True, seed: int = 0, **config: Any) -> Path:
    """Its pad token is its end-of-turn token, as in SmolLM2 and many others."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([json.dumps(row) for row in note_rows(40)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|im_end|>",
                "model_max_length": 512,
            }
        )
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(seed)
    values: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    AutoModelForCausalLM.from_config(LlamaConfig(**(values | config))).save_pretrained(folder)
    return folder


def note_rows(num_rows: int) -> list[dict[str, Any]]:
    """Notes of what was seen, each with its record as JSON."""
    animals, places = ["lion", "zebra", "hippo", "kudu"], ["hill", "river", "gate"]
    rows = []
    for number in range(num_rows):
        animal, place, count = animals[number % 4], places[number % 3], number % 9 + 1
        record = json.dumps({"species": animal, "count": count, "place": place}, separators=(",", ":"))
        note = f"{count} {animal} at the {place}" + ("" if number % 2 else ", all calm and feeding")
        rows.append({"messages": [{"role": "user", "content": note}, {"role": "assistant", "content": record}]})
    return rows


def write_rows(path: Path, num_rows: int = 40) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in note_rows(num_rows)))
    return path
