"""Which weights Muon orthogonalises the updates of."""

from __future__ import annotations

from torch import nn


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained matrices inside the model: not the embeddings, whose rows are looked up one by one, nor the head."""
    kept_apart = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # pyright: ignore
    kept_apart |= {id(parameter) for parameter in head.parameters()} if isinstance(head, nn.Module) else set()
    return [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in kept_apart]
