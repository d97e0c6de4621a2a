"""A model folder with a byte-level tokenizer and a ChatML template, made in a moment and without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIAL)


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the template: one token a byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def write_safetensors(path: Path, name: str = "weight", shape: tuple[int, ...] = (1,)) -> None:
    """A file with one tensor of zeros in float32."""
    size = 4
    for length in shape:
        size *= length
    header = json.dumps({name: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def write_model(folder: Path) -> Path:
    """A folder that resolves as a model, for the stand-in engine."""
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}), encoding="utf-8")
    write_safetensors(folder / "model.safetensors")
    return folder


def write_adapter_folder(folder: Path, word: str) -> Path:
    """An adapter that the stand-in engine takes: it always answers its word."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"], "word": word}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    write_safetensors(
        folder / "adapter_model.safetensors", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    )
    return folder
