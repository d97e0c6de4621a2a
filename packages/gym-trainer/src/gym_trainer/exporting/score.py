"""What a model that scores must carry, so that plain transformers reads the same position as training did.

transformers' classifiers score the last token whose id is not the padding's. Where padding is the end-of-turn token, as
in many chat models, that is the token before the end; so the configuration and the tokenizer get another padding token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gym_data import Tokenizer
from gym_serve.models.load import SCORE_HEAD


def set_padding(model: Any, tokenizer: Tokenizer) -> None:
    """Give the configuration a padding token that no text ends with."""
    pad = _padding(tokenizer)
    model.config.get_text_config().pad_token_id = model.config.pad_token_id = pad


def scores_of(model: Any) -> dict[str, Any] | None:
    """What the head's outputs are called, and the padding's id; None for a model that writes text."""
    if not hasattr(model, SCORE_HEAD):
        return None
    labels = [model.config.id2label[number] for number in range(model.config.num_labels)]
    return {"labels": labels, "pad_token_id": model.config.pad_token_id}


def score_usage(scores: dict[str, Any], source: str, *, is_adapter: bool) -> str:
    """How to score a chat with plain transformers, for a card."""
    labels, folder = scores["labels"], '"path/to/this/folder"'
    lines = ["```python"]
    if is_adapter:
        lines += [
            "from peft import PeftModel",
            "from transformers import AutoModelForSequenceClassification, AutoTokenizer",
            "",
            "base = AutoModelForSequenceClassification.from_pretrained(",
            f'    "{source}", num_labels={len(labels)}, pad_token_id={scores["pad_token_id"]}',
            ")",
            f"model = PeftModel.from_pretrained(base, {folder}).eval()",
        ]
    else:
        lines += [
            "from transformers import AutoModelForSequenceClassification, AutoTokenizer",
            "",
            f"model = AutoModelForSequenceClassification.from_pretrained({folder}).eval()",
        ]
    prompt = "" if labels == ["reward"] else ", add_generation_prompt=True"
    lines += [
        f"tokenizer = AutoTokenizer.from_pretrained({folder})",
        f"text = tokenizer.apply_chat_template(messages, tokenize=False{prompt})",
        'inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)',
        f"scores = model(**inputs).logits[0]  # {', '.join(labels[:8])}{', ...' if len(labels) > 8 else ''}",
        "```",
    ]
    return "\n".join(lines)


def write_padding(folder: Path, tokenizer: Tokenizer, pad_token_id: int | None) -> None:
    """Let the artifact's tokenizer pad with the token that its model takes for padding."""
    path = folder / "tokenizer_config.json"
    token = next((token.text for token in tokenizer.added_tokens if token.id == pad_token_id), None)
    if token is None or not path.is_file():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    config["pad_token"] = token
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _padding(tokenizer: Tokenizer) -> int | None:
    """The tokenizer's own where no text ends with it, else another special token; None where there is none."""
    if tokenizer.pad_id not in tokenizer.eos_ids:
        return tokenizer.pad_id
    taken = {*tokenizer.eos_ids, tokenizer.bos_id}
    return next((token.id for token in tokenizer.added_tokens if token.special and token.id not in taken), None)
