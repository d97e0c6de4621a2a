"""A model's configuration, as transformers reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gym_sdk.errors import MissingExtra, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_config(
    source: Path | str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """The configuration of a folder, or of a hub model, of which only `config.json` is fetched.

    Raises:
        ModelError: there is none, it cannot be read, its values cannot stand together, or its architecture is not one
            that the installed transformers knows.
        MissingExtra: transformers is not installed.
    """
    try:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig
    except ImportError as error:
        raise MissingExtra("reading a model's configuration", package="gym-serve", extra="torch") from error
    try:
        return AutoConfig.from_pretrained(str(source), revision=revision, trust_remote_code=trust_remote_code)
    # Each architecture checks its values in code of its own.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, StrictDataclassError) as error:
        place = f"{source}/config.json" if Path(source).is_dir() else str(source)
        raise ModelError(
            f"{place} is not a configuration that transformers reads: {first_line(error)}", hint=config_hint(str(error))
        ) from error


def first_line(error: Exception) -> str:
    """The first line of what a library says, without its own advice after it."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    told = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return told.split(". This could be because")[0]


def config_hint(text: str) -> str | None:
    """The next step for what transformers says about a configuration."""
    if "trust_remote_code" in text:
        return "its code runs only with model.trust_remote_code=true; read that code first"
    if "does not recognize this architecture" in text:
        return "a newer transformers may know it: pip install -U transformers"
    if "model_type" in text:
        return "model_type names the architecture, such as llama; copy config.json from the model again"
    if "ignore_mismatched_sizes" in text:
        return "its config.json belongs to another model than its weights; copy both from the same place"
    return "check model.source, and that its config.json is whole; a hub model needs the network for it"
