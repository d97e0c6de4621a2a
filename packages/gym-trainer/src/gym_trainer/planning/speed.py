"""How long simulated work takes on a device: each operation by its arithmetic or its traffic, whichever is longer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gym_trainer.planning.hardware import DtypeName, Hardware
from gym_trainer.planning.simulate import Operation

_HOST_LATENCY_S = 28e-6
"""What the host spends on an operation: Python, transformers and autograd. On a card hidden behind the device when
operations are long, and all of the time of small models (measured with Qwen3-0.6B and 1.7B on an H200). A processor has
nothing to hide it behind: there a micro-batch of a whole step is 1.7 times as fast as one of a row (SmolLM2-135M)."""

_DTYPES: dict[torch.dtype, DtypeName] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}

_ATTENTION_SHARE = {"cpu": 0.35, "cuda": 0.45}
"""The part of a matrix product's rate that fused attention reaches in documents of some thousand tokens."""
_LONG_ATTENTION_SHARE = 0.70
"""The same on a card in documents of 16,000 tokens and more (one of 131,072 on an H200, docs/performance.md)."""
_FLOPS_PER_BYTE = (1024, 8192)
"""Of attention in documents of about 2,000 and 16,000 tokens: each number it reads meets half of them."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Simulated work, summed."""

    device_s: float = 0.0
    host_s: float = 0.0
    """Of a CUDA device's host, which launches while the device computes; 0 where they are one."""
    flops: float = 0.0
    num_bytes: float = 0.0
    num_operations: float = 0.0

    @property
    def time_s(self) -> float:
        """The slower of the two sets the pace."""
        return max(self.device_s, self.host_s)

    def __add__(self, other: Work) -> Work:
        return Work(
            device_s=self.device_s + other.device_s,
            host_s=self.host_s + other.host_s,
            flops=self.flops + other.flops,
            num_bytes=self.num_bytes + other.num_bytes,
            num_operations=self.num_operations + other.num_operations,
        )

    def __sub__(self, other: Work) -> Work:
        return self + other.times(-1)

    def times(self, count: float) -> Work:
        return Work(
            device_s=self.device_s * count,
            host_s=self.host_s * count,
            flops=self.flops * count,
            num_bytes=self.num_bytes * count,
            num_operations=self.num_operations * count,
        )

    def time_of_share_s(self, share: float) -> float:
        """Of a micro-batch that is filled to this share only: there are as many operations to launch."""
        fixed_s = self.host_s or self.num_operations * _HOST_LATENCY_S
        if self.host_s:
            return max(self.device_s * share, fixed_s)
        return fixed_s + (self.device_s - fixed_s) * share


def work_of(operations: Iterable[Operation], hardware: Hardware) -> Work:
    """The work of operations run one after another."""
    device_s = flops = 0.0
    num_bytes = count = 0
    for operation in operations:
        device_s += operation_time_s(operation, hardware)
        flops += operation.flops
        num_bytes += operation.num_bytes
        count += 1
    host_s = count * _HOST_LATENCY_S
    if hardware.kind == "cpu":
        device_s, host_s = device_s + host_s, 0.0
    return Work(device_s=device_s, host_s=host_s, flops=flops, num_bytes=num_bytes, num_operations=count)


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
        rate *= _attention_share(operation, hardware)
    return operation.flops / rate


def _attention_share(operation: Operation, hardware: Hardware) -> float:
    """Longer documents keep the matrix units busier, up to a point."""
    share = _ATTENTION_SHARE[hardware.kind]
    if hardware.kind == "cpu":
        return share
    short, long = _FLOPS_PER_BYTE
    flops_per_byte = operation.flops / max(1, operation.num_bytes)
    way = math.log(max(short, min(long, flops_per_byte)) / short) / math.log(long / short)
    return share + way * (_LONG_ATTENTION_SHARE - share)
