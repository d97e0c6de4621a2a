"""What a machine can hold and how fast it computes: from a table by name, or detected and timed where one stands."""

from __future__ import annotations

import dataclasses
import difflib
import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from gym_sdk.errors import UserError

GIB = 2**30
MIB = 2**20

DtypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device that trains. Rates are attainable ones, not those of a data sheet."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    """What a process may use."""
    matmul_flops_per_s: dict[DtypeName, float]
    """The rate of a large matrix product, by dtype; a dtype that is missing is not computed in."""
    bandwidth_bytes_per_s: float
    """Reads and writes of the device's memory."""
    op_latency_s: float
    """What an operation costs, however small."""
    host_link_bytes_per_s: float = 0.0
    """Between host memory and the device; 0 where they are one."""
    host_memory_bytes: int | None = None
    """Beside a card, for what waits there; None where that is not known."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability."""
    num_threads: int | None = None
    """Of a processor."""
    peak_flops_per_s: dict[DtypeName, float] = dataclasses.field(default_factory=dict)
    """What utilisation is measured against: a data sheet's number, or the product timed here."""

    @property
    def training_dtype(self) -> DtypeName:
        """bfloat16 where the device computes in it, float16 on cards without it, float32 on processors."""
        if self.kind == "cpu":
            return "float32"
        return "bfloat16" if "bfloat16" in self.matmul_flops_per_s else "float16"

    def limited_to(self, memory_bytes: int) -> Hardware:
        """The same device with less memory."""
        return dataclasses.replace(self, memory_bytes=min(memory_bytes, self.memory_bytes))


def _card(
    name: str,
    memory_mib: int,
    tflops_half: float,
    bandwidth_gb_per_s: float,
    capability: tuple[int, int],
    tflops_float32: float,
    link_gb_per_s: float = 25.0,
) -> Hardware:
    """A card by its data sheet: dense half-precision rate with float32 accumulation, memory bandwidth, PCIe link.

    A hot H200 reaches 0.69 of its matrix rate and 0.89 of its bandwidth (docs/performance.md); the others are taken
    to do the same.
    """
    half: tuple[DtypeName, ...] = ("bfloat16", "float16") if capability >= (8, 0) else ("float16",)
    peak: dict[DtypeName, float] = dict.fromkeys(half, tflops_half * 1e12) | {"float32": tflops_float32 * 1e12}
    return Hardware(
        name=name,
        kind="cuda",
        memory_bytes=memory_mib * MIB,
        matmul_flops_per_s={dtype: 0.69 * rate for dtype, rate in peak.items()},
        bandwidth_bytes_per_s=0.89 * bandwidth_gb_per_s * 1e9,
        op_latency_s=4e-6,
        host_link_bytes_per_s=link_gb_per_s * 1e9,
        capability=capability,
        peak_flops_per_s=peak,
    )


DEVICES: dict[str, Hardware] = {
    card.name: card
    for card in (
        _card("t4", 15_095, 65, 320, (7, 5), 8.1, link_gb_per_s=12),
        _card("v100-16", 16_160, 125, 900, (7, 0), 15.7, link_gb_per_s=12),
        _card("rtx-3060", 12_044, 25.6, 360, (8, 6), 12.7),
        _card("rtx-3090", 24_253, 71, 936, (8, 6), 35.6),
        _card("rtx-4060-ti-16", 16_052, 44, 288, (8, 9), 22, link_gb_per_s=12),
        _card("rtx-4090", 24_214, 165, 1008, (8, 9), 82),
        _card("rtx-5090", 32_109, 210, 1792, (12, 0), 105, link_gb_per_s=50),
        _card("a10", 22_723, 125, 600, (8, 6), 31.2),
        _card("l4", 22_570, 121, 300, (8, 9), 30.3),
        _card("l40s", 45_470, 362, 864, (8, 9), 91.6),
        _card("a100-40", 40_326, 312, 1555, (8, 0), 19.5),
        _card("a100-80", 81_050, 312, 2039, (8, 0), 19.5),
        _card("h100", 81_079, 989, 3350, (9, 0), 67, link_gb_per_s=53),
        _card("h200", 143_167, 989, 4800, (9, 0), 67, link_gb_per_s=53),
        _card("b200", 182_642, 2250, 8000, (10, 0), 80, link_gb_per_s=53),
    )
}
"""Cards by name. Memory is what CUDA reports, a little under the number on the box."""


def by_name(name: str) -> Hardware:
    """A card of the table, or this machine's `cpu`.

    Raises:
        UserError: no such card, with the nearest names.
    """
    if name == "cpu":
        return detect("cpu")
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key in DEVICES:
        return DEVICES[key]
    near = difflib.get_close_matches(key, DEVICES, n=1)
    raise UserError(
        f"no device named {name}",
        hint=f"did you mean {near[0]}?" if near else f"known devices: cpu, {', '.join(DEVICES)}",
    )


def detect(device: Literal["auto", "cpu", "cuda"] = "auto", *, num_threads: int | None = None) -> Hardware:
    """The device of this machine that a run would use, its rates timed in about a second.

    Raises:
        UserError: a CUDA device was asked for and there is none.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "performance.device is cuda, but this machine has no CUDA device",
            hint="set performance.device=cpu, or plan for a card by name: gym plan run.yaml --device rtx-4090",
        )
    if device != "cpu" and torch.cuda.is_available():
        return _this_card()
    return _this_processor(num_threads or num_usable_cores())


def hold_to(limit_bytes: int) -> None:
    """Let PyTorch take no more of the CUDA device than this, its context included; for the rest of the process.

    A plan for a limit is then kept: what it did not foresee is an out-of-memory error, which halves the micro-batch.
    """
    import torch

    from gym_trainer.planning.memory import CUDA_CONTEXT_BYTES

    _, total_bytes = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, limit_bytes - CUDA_CONTEXT_BYTES) / total_bytes))


def process_bytes() -> int:
    """What this process holds already: the interpreter and its libraries."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 700 * MIB
    return pages * os.sysconf("SC_PAGE_SIZE")


def num_usable_cores() -> int:
    """The cores that this process may run on, within a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def available_host_bytes() -> int:
    """Memory that a process can still take: what the system says is available, within a container's limit."""
    available = 8 * GIB
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return min(available, max(0, limit - used))


@cache
def _this_processor(num_threads: int) -> Hardware:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        rates: dict[DtypeName, float] = {
            "float32": _matmul_rate("cpu", torch.float32, 768),
            "bfloat16": _matmul_rate("cpu", torch.bfloat16, 768),
        }
        bandwidth = _copy_rate("cpu", 64 * MIB)
        latency = _op_latency("cpu")
    finally:
        torch.set_num_threads(before)
    return Hardware(
        name=f"cpu with {num_threads} thread{'s' * (num_threads != 1)}",
        kind="cpu",
        memory_bytes=available_host_bytes() + process_bytes(),
        matmul_flops_per_s=rates,
        bandwidth_bytes_per_s=bandwidth,
        op_latency_s=latency,
        num_threads=num_threads,
        peak_flops_per_s=rates,
    )


@cache
def _this_card() -> Hardware:
    import torch

    properties = torch.cuda.get_device_properties(0)
    free_bytes, _ = torch.cuda.mem_get_info(0)
    rates: dict[DtypeName, float] = {"float16": _matmul_rate("cuda", torch.float16, 4096)}
    if (properties.major, properties.minor) >= (8, 0):
        rates["bfloat16"] = _matmul_rate("cuda", torch.bfloat16, 4096)
    rates["float32"] = _matmul_rate("cuda", torch.float32, 2048)
    return Hardware(
        name=properties.name,
        kind="cuda",
        memory_bytes=free_bytes,
        matmul_flops_per_s=rates,
        bandwidth_bytes_per_s=_copy_rate("cuda", min(1 * GIB, free_bytes // 8)),
        op_latency_s=4e-6,
        host_link_bytes_per_s=_link_rate(),
        host_memory_bytes=available_host_bytes(),
        capability=(properties.major, properties.minor),
        peak_flops_per_s=rates,
    )


def _best_s(run, device: str, repeats: int = 7) -> float:
    import torch

    times = []
    for repeat in range(repeats + 2):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if repeat >= 2:
            times.append(time.perf_counter() - start)
    return min(times)  # others may use the machine meanwhile


def _matmul_rate(device: str, dtype, size: int) -> float:
    import torch

    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty(size, size, device=device, dtype=dtype)
    inner = 8 if device == "cuda" else 1

    def run() -> None:
        for _ in range(inner):
            torch.mm(a, b, out=out)

    return 2 * size**3 * inner / _best_s(run, device)


def _copy_rate(device: str, size_bytes: int) -> float:
    import torch

    source = torch.ones(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / _best_s(lambda: target.copy_(source), device)


def _link_rate() -> float:
    import torch

    source = torch.ones(16 * MIB, dtype=torch.float32).pin_memory()
    target = torch.empty_like(source, device="cuda")
    return source.nbytes / _best_s(lambda: target.copy_(source, non_blocking=True), "cuda")


def _op_latency(device: str) -> float:
    import torch

    x = torch.ones(8, device=device)

    def run() -> None:
        for _ in range(100):
            torch.add(x, x)

    return _best_s(run, device) / 100
