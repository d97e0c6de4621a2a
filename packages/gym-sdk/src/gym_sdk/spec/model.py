"""`model:` which weights a run starts from, and in what precision they are held."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gym_sdk.spec._base import FilePath, SpecModel


class ModelSpec(SpecModel):
    """The base model of a run."""

    source: Annotated[str, Field(min_length=1, examples=["Qwen/Qwen3-8B"]), FilePath(or_name=True)]
    """A hub id (`Qwen/Qwen3-8B`), a folder, a `file.gguf`, or `package:module/file.gguf` for a file inside an
    installed Python package."""

    revision: str | None = None
    """The branch, tag or commit of a hub model; the default branch when not given. The commit is recorded with
    the run."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The precision of weights and arithmetic. `auto` is bfloat16 where the device computes in it, float16 on cards
    without it, float32 on processors."""

    quantization: Literal["none", "nf4", "int8"] = "none"
    """How the frozen base is stored: `nf4` (4 bits) or `int8` by bitsandbytes; adapters stay in full precision."""

    new_tokens: Annotated[list[str], Field(examples=[["<note>", "</note>"]])] = []
    """Special tokens to add to the vocabulary. Their embeddings are trained beside the adapter and saved with it."""

    trust_remote_code: bool = False
    """Whether code that comes with a hub model may run on this machine. Off, because that code can do anything
    you can."""
