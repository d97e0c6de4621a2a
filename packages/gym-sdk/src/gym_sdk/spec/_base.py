"""The base of every section of a run specification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class SpecModel(BaseModel):
    """Frozen, closed to unknown keys, strict about types; a field's documentation is the text under it."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


@dataclass(frozen=True)
class FilePath:
    """Marks text that names a file or folder: a relative one is taken from the folder of the spec's file.

    With `or_name`, plain text may also be a name (a hub id): it is a path when it says so (`./x`, `x.gguf`) or when
    there is such a file or folder.
    """

    or_name: bool = False
