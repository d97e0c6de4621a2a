"""A tiny random model of an architecture, in Hugging Face layout, with a tokenizer that reads any text."""

from __future__ import annotations

import functools
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from gym_trainer.matrix.architectures import Architecture, model_class

_SPECIALS = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
_MERGES = [("e", "r"), ("i", "n"), ("t", "h"), ("th", "e"), ("a", "n"), ("o", "u")]
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def sizes() -> dict[str, Any]:
    """The table of `sizes.yaml`."""
    return yaml.safe_load(files("gym_trainer.matrix").joinpath("sizes.yaml").read_text(encoding="utf-8"))


def tiny_config(architecture: Architecture, **values: Any) -> Any:
    """The architecture's configuration at the sizes of the table, where `values` do not say otherwise."""
    config_class: Any = model_class(architecture.class_name).config_class
    family: dict[str, Any] = sizes()["families"].get(architecture.model_type, {})
    return config_class(**tiny_values(config_class, family | values))


def tiny_values(config_class: Any, family: dict[str, Any]) -> dict[str, Any]:
    """The configuration fields to set: those that the class has, and whatever its family says."""
    table = sizes()
    fields = {name: field.default for name, field in config_class.__dataclass_fields__.items()}
    values = {name: value for name, value in table["common"].items() if name in fields}
    for pattern, value in table["patterns"].items():
        matching = (name for name, default in fields.items() if re.fullmatch(pattern, name) and _is_number(default))
        values |= dict.fromkeys(matching, value)
    values |= family
    return {name: value for name, value in values.items() if value is not None}


def write_tiny_model(architecture: Architecture, folder: Path, *, seed: int = 0, **values: Any) -> Path:
    """A model folder like one from a hub: configuration, random weights, tokenizer and chat template. `values` replace
    those of the table."""
    import torch

    torch.manual_seed(seed)
    cls: Any = model_class(architecture.class_name)
    config = tiny_config(architecture, **values)
    model = cls._from_config(config) if hasattr(cls, "_from_config") else cls(config)
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _write_tokenizer(folder: Path) -> None:
    """A token for every byte, three special ones and a few pairs: any text is encoded, no vocabulary is learned."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*_SPECIALS, *alphabet, *("".join(pair) for pair in _MERGES)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": _SPECIALS[0],
        "bos_token": _SPECIALS[1],
        "eos_token": _SPECIALS[2],
        "model_max_length": 256,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
