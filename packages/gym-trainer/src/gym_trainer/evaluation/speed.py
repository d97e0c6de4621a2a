"""Generating from a model with an adapter as fast as from one without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def merged_for_generation(model: Any) -> Iterator[Any]:
    """The model with its adapter added into its weights, and apart again afterwards, within rounding.

    Two small products beside every layer are a large part of a decoding step's time on a processor. In float32 the
    merged weights say the same; in half precision, where they would not, and in quantized bases, the adapter stays
    beside them.
    """
    mergeable = (
        hasattr(model, "merge_adapter")
        and getattr(model.get_base_model(), "quantization_method", None) is None
        and all(p.dtype == torch.float32 for p in model.parameters())
    )
    if not mergeable:
        yield model
        return
    model.merge_adapter(safe_merge=True)
    try:
        yield model
    finally:
        model.unmerge_adapter()
