"""A causal language model taken apart: the body that makes hidden states, and the head that makes logits of them.

`gym_trainer.fast.loss` needs the two apart. What a model does between its last norm and its logits is known for the
usual cases (a linear layer, a bias, soft-capping, a scale); `split` shows on a few tokens that the parts give the
model's own logits, and refuses a model for which they do not.

Legend: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gym_sdk.errors import GymError
from gym_trainer.fast.loss import OutputHead
from gym_trainer.fast.packing import PackedLayout

_PROBE_LENGTH = 8


class HeadNotLinear(GymError):
    """The model's logits are not a known function of its last hidden states."""


def split(model: nn.Module) -> tuple[nn.Module, OutputHead]:
    """The body and the head of a causal language model, with or without a peft adapter.

    The body is called as the model is and returns an output with `last_hidden_state`. The head holds the model's own
    parameters, so gradients reach a trained head.

    Raises:
        HeadNotLinear: the head has an adapter of its own or does something unknown; the message says which.
    """
    body, head = parts(model)
    _show_equal(_causal(model), body, head)
    return body, head


def parts(model: nn.Module) -> tuple[nn.Module, OutputHead]:
    """What `split` returns, on the word of the configuration alone: for models without bytes."""
    causal_lm = _causal(model)
    output = causal_lm.get_output_embeddings() if hasattr(causal_lm, "get_output_embeddings") else None
    # The decoder where transformers names it: OPT's forward calls it past the module around it. In ModernBERT's decoder
    # it is the name of the head.
    body = causal_lm.get_decoder() if hasattr(causal_lm, "get_decoder") else None
    if body is None or body is causal_lm or body is output:
        body = getattr(causal_lm, getattr(causal_lm, "base_model_prefix", ""), None)
    if body is None or body is causal_lm or output is None:
        raise HeadNotLinear(f"{type(causal_lm).__name__} has no output head apart from its body")
    if hasattr(output, "modules_to_save"):
        output = output.modules_to_save[output.active_adapters[0]]
    if type(output) is not nn.Linear:
        raise HeadNotLinear(f"the output head of {type(causal_lm).__name__} is a {type(output).__name__}")
    text_config = causal_lm.config.get_text_config()
    return body, OutputHead(
        weight_VD=output.weight, bias_V=output.bias, softcap=_softcap(text_config), scale=_scale(text_config)
    )


def _causal(model: nn.Module) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def logits_of(hidden_TD: torch.Tensor, head: OutputHead) -> torch.Tensor:
    """All logits at once, float32 [T, V]: for few tokens, and as the reference of the chunked forms."""
    logits_TV = (hidden_TD @ head.weight_VD.T.to(hidden_TD.dtype)).float()
    if head.bias_V is not None:
        logits_TV = logits_TV + head.bias_V.float()
    logits_TV = logits_TV * head.scale
    return logits_TV if head.softcap is None else head.softcap * torch.tanh(logits_TV / head.softcap)


def _softcap(text_config: Any) -> float | None:
    return getattr(text_config, "final_logit_softcapping", None)


def _scale(text_config: Any) -> float:
    """Cohere multiplies by `logit_scale`; Granite divides by `logits_scaling`."""
    if (scale := getattr(text_config, "logit_scale", None)) is not None:
        return float(scale)
    if (divisor := getattr(text_config, "logits_scaling", None)) is not None:
        return 1.0 / float(divisor)
    return 1.0


def _layout_kwargs(causal_lm: nn.Module, device: torch.device) -> dict[str, Any]:
    """The layout of one document for attention that reads it; some recurrent layers refuse to be told of it."""
    name = str(getattr(causal_lm.config, "_attn_implementation", ""))
    if not name.startswith(("gym_", "flash_attention")):
        return {}
    return PackedLayout.from_lengths([_PROBE_LENGTH], device).model_kwargs()


@torch.no_grad()
def _show_equal(causal_lm: nn.Module, body: nn.Module, head: OutputHead) -> None:
    was_training = causal_lm.training
    causal_lm.eval()
    try:
        ids_1T = torch.arange(3, 3 + _PROBE_LENGTH, device=head.weight_VD.device)[None] % head.weight_VD.shape[0]
        kwargs = _layout_kwargs(causal_lm, ids_1T.device)
        caught: list[Any] = []
        handle = body.register_forward_hook(lambda _module, _args, output: caught.append(output))
        try:
            expected_TV = causal_lm(input_ids=ids_1T, use_cache=False, **kwargs).logits[0].double()
        finally:
            handle.remove()
        if not caught:
            raise HeadNotLinear(f"the forward of {type(causal_lm).__name__} goes past its body")
        output = caught[0]
        hidden_TD = (output[0] if isinstance(output, tuple) else output.last_hidden_state)[0]
        got_TV = logits_of(hidden_TD, head).double()
    finally:
        causal_lm.train(was_training)
    tolerance = 1e-4 if hidden_TD.dtype == torch.float32 else 0.02
    if got_TV.shape != expected_TV.shape or not (got_TV - expected_TV).norm() <= tolerance * expected_TV.norm():
        raise HeadNotLinear(
            f"{type(causal_lm).__name__} does more between its hidden states and its logits than a linear head",
        )
