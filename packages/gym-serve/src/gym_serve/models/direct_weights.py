"""Linear layers whose weight a model's own code reads, instead of or besides calling the layer."""

from __future__ import annotations

_NEVER_CALLED: dict[str, frozenset[str]] = {
    # `self.dt_proj.weight @ time_step`: the bias is added inside the scan (transformers 5.17 to 5.24)
    "mamba": frozenset({"dt_proj"}),
    "falcon_mamba": frozenset({"dt_proj"}),
    "jamba": frozenset({"dt_proj"}),
    # the router multiplies in float32
    "longcat_flash": frozenset({"classifier"}),
    # AltUp clips these coefficients while it trains, and calls the layer only to answer
    "gemma3n": frozenset({"correction_coefs"}),
    "gemma3n_text": frozenset({"correction_coefs"}),
}
"""Name endings by `model_type`. `gym matrix` holds both tables: what should be in them fails there."""

_ALSO_READ: dict[str, frozenset[str]] = {
    # clipped in place while AltUp trains
    "gemma3n": frozenset({"prediction_coefs"}),
    "gemma3n_text": frozenset({"prediction_coefs"}),
}


_EXPERTS_READ = frozenset({"dbrx"})
"""Model types whose experts' weights another module reads (`self.mlp.v1`), past the wrapper that peft puts around
theirs."""


def experts_are_read(model_type: str) -> bool:
    """Whether an adapter of fused experts would not be seen."""
    return model_type in _EXPERTS_READ


def never_called(model_type: str) -> frozenset[str]:
    """The name endings of layers beside which an adapter would not learn."""
    return _NEVER_CALLED.get(model_type, frozenset())


def kept_unquantized(model_type: str) -> frozenset[str]:
    """The name endings of layers whose quantized bytes would be taken for numbers."""
    return never_called(model_type) | _ALSO_READ.get(model_type, frozenset())
