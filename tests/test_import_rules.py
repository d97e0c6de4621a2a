"""Guards what loads what: without torch installed, only the modules that compute may fail to import."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

FRAMEWORKS = ("torch", "transformers", "peft", "accelerate", "safetensors", "gguf", "triton")

# Imports every module of a package where the frameworks are not to be found; prints those that failed, and why.
PROBE = """
import importlib, json, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {frameworks!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
failed = {{}}
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(package.__path__, {package!r} + ".", onerror=lambda name: None):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as missing:
        failed[module.name] = missing.name
print(json.dumps(failed))
"""

# Where the arithmetic lives; everything else must load without a framework.
COMPUTES = {
    "gym_sdk": (),
    "gym_data": (),
    "gym_serve": ("gym_serve.models", "gym_serve.engines"),
    "gym_trainer": (
        "gym_trainer.adapters",
        "gym_trainer.fast",
        "gym_trainer.loop",
        "gym_trainer.objectives",
        "gym_trainer.exporting",
        "gym_trainer.evaluation",
        "gym_trainer.planning",  # runs the step on torch's meta device
        "gym_trainer.bench",
        "gym_trainer.matrix",
    ),
}


@pytest.mark.parametrize("package", COMPUTES)
def test_only_modules_that_compute_need_a_framework(package: str) -> None:
    probe = PROBE.format(frameworks=FRAMEWORKS, package=package)
    done = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True)
    failed: dict[str, str] = json.loads(done.stdout)
    surprising = {name: missing for name, missing in failed.items() if not name.startswith(COMPUTES[package])}
    assert not surprising, f"cannot be imported without a framework: {surprising}"


@pytest.mark.parametrize("package", COMPUTES)
def test_importing_a_package_loads_nothing_heavy(package: str) -> None:
    heavy = {*FRAMEWORKS, "grpc", "pydantic", "numpy", "datasets", "starlette", "httpx"}
    code = f"import {package}, sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}} & {heavy!r}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
