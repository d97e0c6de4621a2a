"""A fully trained model, in the layout that plain transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from gym_sdk.errors import RunFailed
from gym_trainer.exporting.folder import Base, complete_or_absent, write_companions
from gym_trainer.exporting.probe import probe_ids, probe_logits, relative_distance

_MAX_SHARD_SIZE = "4GB"


def save_model(
    model: Any, folder: Path, base: Base, *, base_logits_TV: Tensor, metadata: dict[str, Any], replace: bool = False
) -> None:
    """Write every weight, in the precision that it was trained in.

    Raises:
        RunFailed: the logits are still those of the base model.
    """
    if relative_distance(base_logits_TV, probe_logits(model, probe_ids(base))) == 0:
        raise RunFailed(
            "training changed nothing: the logits are those of the base model",
            hint="is train.learning_rate far too small, or is there a single step of warm-up?",
        )
    with complete_or_absent(folder, replace=replace) as staged:
        model.save_pretrained(str(staged), safe_serialization=True, max_shard_size=_MAX_SHARD_SIZE)
        write_companions(staged, base, model, metadata)
