"""How libraries behave in a process of Gym's: without spinning threads, and without talk that nobody can act on."""

from __future__ import annotations

import os
import warnings
from logging import ERROR, getLogger


def wait_without_spinning() -> None:
    """Let OpenMP's threads sleep while they wait. To be called before torch is imported, which is when it is read.

    By default they spin, burning the very core that the thread they wait for needs as soon as anything else runs on
    the machine: on two cores shared with other busy processes, a training step took ten times as long. Sleeping costs a
    few microseconds an operation. Only the environment can ask for it; what the user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")


def grow_memory_in_place() -> None:
    """Let PyTorch's blocks of CUDA memory grow, instead of lying beside each other with gaps that fit nothing.

    Read when CUDA starts, and only from the environment; what the user has set stays.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if not any(name in os.environ for name in names):
        os.environ[names[0]] = "expandable_segments:True"


def quieten_libraries() -> None:
    """No bars of transformers for work of a second, and no warnings of its own deprecations. To be called before
    transformers is imported, and without importing it: what is wrong with the input is said sooner."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Said at every import on processors with AVX-512 BF16: an optional kernel for generation, which Gym does not use.
    getLogger("bitsandbytes.backends.cpu.ops").setLevel(ERROR)
    for text in ("Setting `save_embedding_layers`", "You have requested `ensure_weight_tying`"):
        warnings.filterwarnings("ignore", message=text, category=UserWarning, module=r"peft\..*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\..*")
