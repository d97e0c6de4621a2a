"""Logits on a short, fixed text: do two forms of a model say the same?

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gym_data.record import text_message
from gym_trainer.exporting.folder import Base

_TEXT = "Count the 12 zebras at Kilima Hill, 06:45; ¿qué más? 数を言ってください。"


def probe_ids(base: Base) -> list[int]:
    """A prompt as the model is really asked; plain text where it has no template. New tokens stand at its end."""
    if base.tokenizer.chat_template is None:
        return [*base.tokenizer.encode(_TEXT), *base.new_token_ids]
    return [*base.renderer.encode_prompt([text_message("user", _TEXT)]), *base.new_token_ids]


@torch.no_grad()
def probe_logits(model: Any, ids: list[int]) -> Tensor:
    """float64 [T, V] on the host. The model is put back into the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        tokens = torch.tensor([ids], device=next(model.parameters()).device)
        return model(input_ids=tokens, use_cache=False).logits[0].double().cpu()
    finally:
        model.train(was_training)


def relative_distance(a_TV: Tensor, b_TV: Tensor) -> float:
    """The norm of the difference, over that of `a` about its mean: a constant added to all logits says nothing.

    What a classifier gives, a number for each class and no row of them for each token, is compared as it is.
    """
    if a_TV.ndim == 1:
        return float((a_TV - b_TV).norm() / a_TV.norm())
    centred_TV = a_TV - a_TV.mean(dim=-1, keepdim=True)
    difference_TV = centred_TV - (b_TV - b_TV.mean(dim=-1, keepdim=True))
    return float(difference_TV.norm() / centred_TV.norm())
