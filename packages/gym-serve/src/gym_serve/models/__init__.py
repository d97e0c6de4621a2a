"""Models: where they come from, how they are loaded, and the adapters on top.

`resolve` needs no torch; `load_model` and `load_adapter` import it when they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gym_serve.models.adapters import AdapterInfo, inspect_adapter, load_adapter
    from gym_serve.models.config import read_config
    from gym_serve.models.load import load_model
    from gym_serve.models.progress import ProgressCallback
    from gym_serve.models.resolution import ResolvedModel, resolve
    from gym_serve.models.target import ServeTarget, open_target

_HOMES = {
    "AdapterInfo": "adapters",
    "inspect_adapter": "adapters",
    "load_adapter": "adapters",
    "load_model": "load",
    "ProgressCallback": "progress",
    "read_config": "config",
    "ResolvedModel": "resolution",
    "resolve": "resolution",
    "ServeTarget": "target",
    "open_target": "target",
}

__all__ = [
    "AdapterInfo",
    "ProgressCallback",
    "ResolvedModel",
    "ServeTarget",
    "inspect_adapter",
    "load_adapter",
    "load_model",
    "open_target",
    "read_config",
    "resolve",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
