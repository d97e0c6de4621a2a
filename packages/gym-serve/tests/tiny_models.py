"""Tiny random models for tests, made from a config in a moment."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB_SIZE = 128
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_model(kind: str = "llama", *, seed: int = 0, **settings: object) -> PreTrainedModel:
    """A model of one architecture with weights wide enough that greedy choices are far from ties."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](**(_SHAPE | settings))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 or "sinks" in name:
                parameter.normal_(std=0.15 if "embed" not in name else 1.0)
    return model


def write_adapter(
    folder: Path, *, seed: int, rank: int = 4, targets: list[str] | None = None, **settings: object
) -> Path:
    """A LoRA adapter for `tiny_model()` that changes what it says."""
    targets = targets or ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    model = get_peft_model(tiny_model(), LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, **settings))
    torch.manual_seed(1000 + seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
            elif "lora_" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def prompts(count: int, *, seed: int = 0, low: int = 1, high: int = 40) -> list[list[int]]:
    """Random prompts of mixed lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def greedy_reference(model: torch.nn.Module, prompt: list[int], max_tokens: int) -> list[int]:
    """What transformers' own `generate` says, alone."""
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return out[0, len(prompt) :].tolist()
