"""What a model that scores must carry, so that plain transformers reads the same position as training did."""

from __future__ import annotations

from typing import Any

from gym_data import Tokenizer


def set_padding(model: Any, tokenizer: Tokenizer) -> None:
    """Give the configuration a padding token that no text ends with.

    transformers' classifiers score the last token whose id is not the padding's. Where padding is the end-of-turn
    token, as in many chat models, that is the token before the end.
    """
    pad: int | None = tokenizer.pad_id
    if pad in tokenizer.eos_ids:
        pad = next((t.id for t in tokenizer.added_tokens if t.special and t.id not in tokenizer.eos_ids), None)
    model.config.get_text_config().pad_token_id = model.config.pad_token_id = pad
