"""What a machine can do: versions, devices, memory, optional parts, each missing one with its install command.

Works without torch. Shows nothing that identifies a person or a machine, so that it can be pasted into a bug report.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from gym_sdk.cli.console import format_size
from gym_sdk.folders import cache_dir

State = Literal["ok", "missing", "note"]

_CORE = ("gym-sdk", "gym-data", "gym-serve", "gym-trainer")
_TORCH = ("torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers", "numpy")
_OPTIONAL = (
    ("bitsandbytes", "bitsandbytes", "nf4 and int8 bases (model.quantization), 8-bit optimizers", "gym-trainer[cuda]"),
    ("math_verify", "math-verify", "the reward of kind math", "gym-trainer[math]"),
    ("torchao", "torchao", "train.optimizer adamw_torch_8bit and adamw_torch_4bit", "torchao"),
    ("schedulefree", "schedulefree", "train.optimizer schedule_free_*", "schedulefree"),
    ("galore_torch", "galore-torch", "train.optimizer galore_adamw", "galore-torch"),
    ("apollo_torch", "apollo-torch", "train.optimizer apollo_adamw", "apollo-torch"),
)
_LOW_DISK_BYTES = 5e9


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the diagnosis."""

    name: str
    state: State
    value: str
    hint: str | None = None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All lines, by section."""

    sections: dict[str, list[Finding]]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: [asdict(finding) for finding in found] for name, found in self.sections.items()}

    def text(self) -> str:
        """For a terminal."""
        width = max(len(finding.name) for found in self.sections.values() for finding in found)
        marks = {"ok": "ok", "missing": "--", "note": " !"}
        lines: list[str] = []
        for name, found in self.sections.items():
            lines += ["", name] if lines else [name]
            for finding in found:
                lines.append(f"  {marks[finding.state]:<3} {finding.name:<{width}}  {finding.value}")
                if finding.hint:
                    lines.append(f"      {'':<{width}}  hint: {finding.hint}")
        return "\n".join(lines)

    def markdown(self) -> str:
        """For a bug report."""
        lines = ["<details><summary>gym doctor</summary>", ""]
        for name, found in self.sections.items():
            lines += [f"**{name}**", "", "| | | |", "| --- | --- | --- |"]
            lines += [f"| {f.name} | {f.state} | {f.value.replace('|', '/')} |" for f in found]
            lines.append("")
        return "\n".join([*lines, "</details>"])


def diagnose() -> Diagnosis:
    """Look at everything; a part that cannot be looked at is a line that says so."""
    parts: dict[str, Callable[[], list[Finding]]] = {
        "packages": _packages,
        "machine": _machine,
        "devices": _devices,
        "optional parts": _optional,
        "settings": _settings,
    }
    sections: dict[str, list[Finding]] = {}
    for name, look in parts.items():
        try:
            sections[name] = look()
        except Exception as error:  # noqa: BLE001 - a doctor must not fall ill itself
            sections[name] = [Finding(name=name, state="note", value=f"{type(error).__name__}: {error}")]
    return Diagnosis(sections=sections)


def _packages() -> list[Finding]:
    found = [Finding(name="python", state="ok", value=platform.python_version())]
    for package in _CORE:
        found.append(_package(package, hint=f"pip install {package}"))
    for package in _TORCH:
        found.append(_package(package, hint='pip install "gym-trainer[torch]"'))
    return found


def _package(package: str, *, hint: str) -> Finding:
    try:
        return Finding(name=package, state="ok", value=version(package))
    except PackageNotFoundError:
        return Finding(name=package, state="missing", value="not installed", hint=hint)


def _machine() -> list[Finding]:
    found = [
        Finding(name="system", state="ok", value=f"{platform.system()} {platform.release()} {platform.machine()}"),
        Finding(name="processor", state="ok", value=f"{_processor_name()}, {_usable_cores()} usable cores"),
    ]
    if flags := _processor_flags():
        found.append(Finding(name="processor features", state="ok", value=", ".join(flags)))
    memory = _memory_bytes()
    if memory is not None:
        total, available = memory
        found.append(Finding(name="memory", state="ok", value=f"{format_size(available)} free of {format_size(total)}"))
    folder = cache_dir()
    existing = next(path for path in [folder, *folder.parents] if path.exists())
    free = shutil.disk_usage(existing).free
    low = free < _LOW_DISK_BYTES
    found.append(
        Finding(
            name="disk of the cache",
            state="note" if low else "ok",
            value=f"{format_size(free)} free",
            hint="GYM_CACHE_DIR moves the cache" if low else None,
        )
    )
    return found


def _devices() -> list[Finding]:
    if find_spec("torch") is None:
        return [
            Finding(
                name="training",
                state="missing",
                value="no torch; training-free methods and the client work",
                hint='pip install "gym-trainer[torch]"',
            )
        ]
    import torch

    found = [Finding(name="torch", state="ok", value=f"built for {_torch_build()}")]
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        hint = "nvidia-smi shows whether the driver sees a card" if built else None
        found.append(Finding(name="CUDA", state="note", value="no device: training runs on the processor", hint=hint))
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        half = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16 only"
        value = f"{properties.name}, {format_size(free)} free of {format_size(total)}, "
        value += f"compute capability {properties.major}.{properties.minor}, {half}"
        found.append(Finding(name=f"GPU {index}", state="ok", value=value))
    return found


def _optional() -> list[Finding]:
    found: list[Finding] = []
    for module, package, purpose, what in _OPTIONAL:
        if find_spec(module) is not None:
            found.append(Finding(name=package, state="ok", value=f"{_version_of(package)}: {purpose}"))
        else:
            is_elsewhere = what == "gym-trainer[cuda]" and sys.platform != "linux"
            hint = "on Linux only" if is_elsewhere else f'pip install "{what}"'
            found.append(Finding(name=package, state="missing", value=purpose, hint=hint))
    return found


def _settings() -> list[Finding]:
    """Names of environment variables that change what Gym does; never their values, which may be secrets or paths."""
    prefixes = ("GYM_", "HF_", "TRANSFORMERS_", "CUDA_VISIBLE", "OMP_", "MKL_", "PYTORCH_", "TORCH_", "NCCL_")
    names = sorted(name for name in os.environ if name.startswith(prefixes))
    return [Finding(name="environment", state="ok", value=", ".join(names) if names else "nothing set")]


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "installed"


def _torch_build() -> str:
    import torch

    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "processors"


def _processor_name() -> str:
    return next(iter(_cpuinfo("model name")), platform.processor() or platform.machine())


def _processor_flags() -> list[str]:
    """The features that decide how fast matrix products are."""
    flags = set(next(iter(_cpuinfo("flags")), "").split())
    return [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx_vnni") if flag in flags]


def _cpuinfo(key: str) -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key]


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes() -> tuple[int, int] | None:
    """Total and available, where the system says so in /proc."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    values = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    return values["MemTotal"], values["MemAvailable"]
