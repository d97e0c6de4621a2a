"""One architecture in a process of its own, with a cap on its memory: its crash is its own."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gym_trainer.matrix.architectures import Architecture
from gym_trainer.records import write_json

VERSION = 2
"""Of what is checked: a result of another version is not used again."""


def versions() -> dict[str, Any]:
    """What a result depends on."""
    from importlib.metadata import PackageNotFoundError, version

    def of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {"checks": VERSION} | {name: of(name) for name in ("torch", "transformers", "peft", "bitsandbytes")}


def run_child(architecture: Architecture, result: Path, log: Path, memory_bytes: int) -> None:
    """The body of the child process: check, and write the result, complete or absent."""
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["HF_HUB_OFFLINE"] = "1"

    import torch

    from gym_serve.libraries import quieten_libraries
    from gym_trainer.matrix.checks import check_architecture

    torch.set_num_threads(1)
    quieten_libraries()
    write_json(result, {"versions": versions(), "row": asdict(check_architecture(architecture))})


def read_result(result: Path) -> dict[str, Any] | None:
    """A row as plain data, or None where there is none of these versions."""
    try:
        found = json.loads(result.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return found["row"] if found.get("versions") == versions() else None
