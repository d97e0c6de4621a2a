"""The header of a safetensors file, read without torch: what it holds, and whether all of it is there."""

from __future__ import annotations

import json
from pathlib import Path


def header_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes by name: 8 bytes of length, then JSON. Checks that the file holds what it promises.

    Raises:
        ValueError: no safetensors file, or one that is cut short.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise ValueError(f"{path.name} is only a pointer of Git LFS; git lfs pull fetches the file itself")
        length = int.from_bytes(start, "little")
        if not 2 <= length <= min(size - 8, 100_000_000):
            raise ValueError(f"{path.name} is not a safetensors file")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} is not a safetensors file")
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end != size:
        raise ValueError(f"{path.name} is {size} bytes long and should be {8 + length + end}")
    return {key: tuple(entry["shape"]) for key, entry in header.items()}
