"""A model's configuration and a run's data, as far as a plan needs them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_trainer.planning.decision import DataShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from gym_data import Prepared, Streamed, TokenStore
    from gym_sdk.spec import RunSpec
    from gym_sdk.spec.model import ModelSpec
    from gym_trainer.planning.hardware import DtypeName

_MOST_ROWS_READ = 2000


def load_config(model: ModelSpec) -> tuple[PreTrainedConfig, Path | None]:
    """The configuration, and the model's folder where it is on this machine already.

    Of a hub model only its `config.json` is fetched, a few kilobytes.

    Raises:
        ModelError: no such model, or an architecture that the installed transformers does not know.
    """
    from gym_serve.models import read_config

    folder = _local_folder(model)
    config = read_config(folder or model.source, revision=model.revision, trust_remote_code=model.trust_remote_code)
    return config, folder


def teacher_bytes(spec: RunSpec) -> Callable[[DtypeName], int]:
    """What a teacher takes in a run of a dtype, from its configuration; nothing where the method has none."""
    import torch

    from gym_sdk.spec import Distillation
    from gym_sdk.spec.model import ModelSpec
    from gym_trainer.planning.workload import frozen_bytes

    method = spec.method
    if not isinstance(method, Distillation):
        return lambda dtype: 0
    source = ModelSpec(source=method.teacher, trust_remote_code=spec.model.trust_remote_code)
    config, _ = load_config(source)
    return lambda dtype: frozen_bytes(config, getattr(torch, dtype), method.teacher_quantization)


def data_shape(spec: RunSpec, folder: Path) -> DataShape:
    """The rows' lengths, from the prepared data (kept for the run itself)."""
    from gym_data import open_stream, prepare
    from gym_sdk.folders import cache_dir

    objective = getattr(spec.method, "data_objective", None)
    if spec.data.streaming:
        streamed = open_stream(spec.data, folder, cache_dir=cache_dir(), seed=spec.seed, objective=objective)
        streamed.train.close()
        return shape_of(spec, streamed)
    return shape_of(spec, prepare(spec.data, folder, cache_dir=cache_dir(), seed=spec.seed, objective=objective))


def shape_of(spec: RunSpec, data: Prepared | Streamed) -> DataShape:
    """The lengths of the rows of a run. Of rows that are read while training, the first are taken for all."""
    from gym_data import Prepared

    if isinstance(data, Prepared):
        lengths = data.train.group_lengths
        return DataShape(
            num_rows=len(lengths),
            num_tokens=int(lengths.sum()),
            longest_row_tokens=int(lengths.max(initial=1)),
            shared_tokens=_shared_tokens(data.train),
            longest_step_tokens=_longest_step(spec, lengths),
        )
    num_rows = (spec.train.max_steps or 1) * spec.batch_rows
    return DataShape(
        num_rows=num_rows,
        num_tokens=round(num_rows * data.preview.mean_row_tokens),
        longest_row_tokens=spec.data.max_length,
    )


def _shared_tokens(store: TokenStore) -> int:
    """What the documents of rows begin with alike; of many rows, from some of them spread over all."""
    num_rows = len(store.group_lengths)
    if len(store) == num_rows:
        return 0
    from gym_trainer.loop.batch import Row

    some = range(0, num_rows, max(1, num_rows // _MOST_ROWS_READ))
    shared = sum(sum(Row(index=index, documents=store.group(index)).prefix_lengths()) for index in some)
    return round(shared * num_rows / len(some))


_MOST_EPOCHS = 20
"""Whose order is looked through for the longest step; later ones are taken to be like these."""


def _longest_step(spec: RunSpec, lengths: Any) -> int:
    from gym_data.packing import steps

    num_epochs = max(1, min(_MOST_EPOCHS, math.ceil(spec.train.epochs)))
    return max(
        (
            int(lengths[rows].sum())
            for epoch in range(num_epochs)
            for rows in steps(lengths, batch_size=spec.batch_rows, seed=spec.seed, epoch=epoch)
        ),
        default=1,
    )


def _local_folder(model: ModelSpec) -> Path | None:
    from gym_serve.models import resolve

    path = Path(model.source).expanduser()
    if path.exists() or model.source.startswith("package:") or model.source.endswith(".gguf"):
        return resolve(model.source, revision=model.revision).folder
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model.source, "tokenizer.json", revision=model.revision)
    return Path(cached).parent if isinstance(cached, str) else None
