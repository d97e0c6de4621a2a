"""What a run needs and how fast it will be, before any of its weights is read.

hardware = detect()                      # or by_name("rtx-4090")
print(render(plan(spec, config, hardware)))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gym_trainer.planning.choose import plan
    from gym_trainer.planning.decision import DataShape, Part, Plan
    from gym_trainer.planning.hardware import DEVICES, Hardware, by_name, detect
    from gym_trainer.planning.table import render

_HOMES = {
    "DEVICES": "hardware",
    "DataShape": "decision",
    "Hardware": "hardware",
    "Part": "decision",
    "Plan": "decision",
    "by_name": "hardware",
    "detect": "hardware",
    "plan": "choose",
    "render": "table",
}

__all__ = ["DEVICES", "DataShape", "Hardware", "Part", "Plan", "by_name", "detect", "plan", "render"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"gym_trainer.planning.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
