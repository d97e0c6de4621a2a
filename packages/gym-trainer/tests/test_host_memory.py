"""Guards that a processor's freed tensors serve the next step instead of faulting in again."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from gym_trainer.fast.host_memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    return torch.ones(16 * 2**20)
for _ in range(12):  # until the allocator has settled
    step()
before = faults()
for _ in range(10):
    step()
print(faults() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page faults are counted as Linux counts them")
def test_freed_tensors_are_not_faulted_in_again() -> None:
    def faults(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", PROGRAM, how], check=True, capture_output=True, text=True)
        return int(done.stdout)

    pages_of_one_tensor = 16 * 2**20 * 4 // 4096
    # huge pages make one fault of 512, so the left side is a share of its own run
    assert faults("kept") < pages_of_one_tensor / 512
    assert faults("given back") >= 10 * pages_of_one_tensor / 512
