"""How long simulated work takes on a device: each operation by its arithmetic or its traffic, whichever is longer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gym_trainer.planning.hardware import DtypeName, Hardware
from gym_trainer.planning.simulate import Operation

_HOST_LATENCY_S = 7e-6
"""What the host spends to launch an operation from Python; hidden behind the device when operations are long."""

_DTYPES: dict[torch.dtype, DtypeName] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}

_ATTENTION_SHARE = {"cpu": 0.35, "cuda": 0.45}
"""The part of a matrix product's rate that fused attention reaches."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Simulated work, summed."""

    time_s: float = 0.0
    flops: float = 0.0
    num_bytes: int = 0
    num_operations: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            time_s=self.time_s + other.time_s,
            flops=self.flops + other.flops,
            num_bytes=self.num_bytes + other.num_bytes,
            num_operations=self.num_operations + other.num_operations,
        )

    def __sub__(self, other: Work) -> Work:
        return self + other.times(-1)

    def times(self, count: float) -> Work:
        return Work(
            time_s=self.time_s * count,
            flops=self.flops * count,
            num_bytes=round(self.num_bytes * count),
            num_operations=round(self.num_operations * count),
        )


def work_of(operations: Iterable[Operation], hardware: Hardware) -> Work:
    """The time of operations run one after another."""
    device_s = flops = 0.0
    num_bytes = count = 0
    for operation in operations:
        device_s += operation_time_s(operation, hardware)
        flops += operation.flops
        num_bytes += operation.num_bytes
        count += 1
    host_s = count * _HOST_LATENCY_S if hardware.kind == "cuda" else 0.0
    return Work(time_s=max(device_s, host_s), flops=flops, num_bytes=num_bytes, num_operations=count)


def operation_time_s(operation: Operation, hardware: Hardware) -> float:
    """A roofline, with a floor for what any operation costs."""
    traffic_s = operation.num_bytes / hardware.bandwidth_bytes_per_s
    return max(arithmetic_time_s(operation, hardware), traffic_s) + hardware.op_latency_s


def arithmetic_time_s(operation: Operation, hardware: Hardware) -> float:
    """0 for operations without matrix arithmetic."""
    if not operation.flops:
        return 0.0
    dtype = _DTYPES.get(operation.dtype, "float32")
    rate = hardware.matmul_flops_per_s.get(dtype, hardware.matmul_flops_per_s["float32"])
    if "attention" in operation.name:
        rate *= _ATTENTION_SHARE[hardware.kind]
    return operation.flops / rate
