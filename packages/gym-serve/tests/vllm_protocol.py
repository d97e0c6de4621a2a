"""Writes `data/vllm-protocol.json` from a vLLM wheel: the JSON Schemas of its own protocol models.

    python packages/gym-serve/tests/vllm_protocol.py vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl

The models are imported from the wheel's files; what they import besides (torch, the engine) is stood in for by empty
classes, for none of it is part of a schema that Gym uses.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import tempfile
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_name("data") / "vllm-protocol.json"
REAL = (
    "vllm",
    "vllm.entrypoints",
    "vllm.entrypoints.openai",
    "vllm.entrypoints.openai.completion",
    "vllm.entrypoints.openai.completion.protocol",
    "vllm.entrypoints.serve",
    "vllm.entrypoints.serve.engine",
    "vllm.entrypoints.serve.engine.protocol",
    "vllm.entrypoints.serve.lora",
    "vllm.entrypoints.serve.lora.protocol",
    "vllm.entrypoints.generate",
    "vllm.entrypoints.generate.base",
    "vllm.entrypoints.generate.base.protocol",
    "vllm.sampling_params",
    "vllm.logprobs",
)
"""What is read from the wheel; packages among these are taken without their `__init__`."""
MODELS = {
    "vllm.entrypoints.openai.completion.protocol": ("CompletionRequest", "CompletionStreamResponse"),
    "vllm.entrypoints.serve.engine.protocol": ("ErrorResponse", "ModelList"),
    "vllm.entrypoints.serve.lora.protocol": ("LoadLoRAAdapterRequest", "UnloadLoRAAdapterRequest"),
}


class _StandIn(types.ModuleType):
    """A module in which every name is there."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.isupper():
            return 1_000_000  # a limit
        if name.islower():
            return lambda *_, **__: _StandIn(name)
        made = type(name, (), {"__get_pydantic_core_schema__": classmethod(_any_schema)})
        setattr(self, name, made)
        return made


def _any_schema(cls: type, source: object, handler: object) -> Any:
    from pydantic_core import core_schema

    return core_schema.any_schema()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The wheel's files for `REAL`, stand-ins for the rest of vLLM and for torch."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        if name.partition(".")[0] not in ("vllm", "torch"):
            return None
        if name in REAL:
            file = self._root / (name.replace(".", "/") + ".py")
            if file.is_file():
                return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def main(wheel: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
        sys.meta_path.insert(0, _Finder(Path(folder)))
        schemas = {
            name: getattr(importlib.import_module(module), name).model_json_schema()
            for module, names in MODELS.items()
            for name in names
        }
    TARGET.parent.mkdir(exist_ok=True)
    content = {"vllm": Path(wheel).name.split("-")[1], "license": "Apache-2.0", "schemas": schemas}
    TARGET.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
