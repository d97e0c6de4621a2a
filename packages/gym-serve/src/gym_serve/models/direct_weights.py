"""Linear layers whose weight a model's own code multiplies with, instead of calling the layer."""

from __future__ import annotations

_DIRECT: dict[str, frozenset[str]] = {
    # `self.dt_proj.weight @ time_step`: the bias is added inside the scan (transformers 5.17 to 5.24)
    "mamba": frozenset({"dt_proj"}),
    "falcon_mamba": frozenset({"dt_proj"}),
    "jamba": frozenset({"dt_proj"}),
}
"""Name endings by `model_type`. `gym matrix` holds this table: an adapter beside a layer that is never called gets no
gradient, and fails there."""


def direct_weights(model_type: str) -> frozenset[str]:
    """The name endings of layers that are never called in this architecture.

    What stands in the place of such a layer has no effect: an adapter beside it is never computed, and the bytes of a
    quantized weight are multiplied as if they were numbers. So both leave these layers as they are.
    """
    return _DIRECT.get(model_type, frozenset())
