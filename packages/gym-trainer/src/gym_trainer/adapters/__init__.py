"""From an `adapter:` section to a model in which just that is trained."""

from __future__ import annotations

from gym_trainer.adapters.attach import TrainableModel, attach
from gym_trainer.adapters.experts import expert_weights

__all__ = ["TrainableModel", "attach", "expert_weights"]
