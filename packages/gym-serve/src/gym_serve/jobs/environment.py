"""What a job's processes find in their environment: a short list, never all that the daemon was started with."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_NEEDED = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "VIRTUAL_ENV"),
    *("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "NVIDIA_DRIVER_CAPABILITIES", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "TORCH_HOME", "TRITON_CACHE_DIR"),
    *("TORCHINDUCTOR_CACHE_DIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
)


def job_environment(own: Mapping[str, str], allowed: Sequence[str], gpus: Sequence[int]) -> dict[str, str]:
    """The environment of a job that holds the GPUs of these indices (among those that the daemon itself may see)."""
    environment = {name: own[name] for name in (*_NEEDED, *allowed) if name in own}
    visible = [device for device in own.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[gpu] if visible else str(gpu) for gpu in gpus)
    environment["PYTHONUNBUFFERED"] = "1"
    environment["HF_HUB_DISABLE_TELEMETRY"] = "1"
    return environment


def count_gpus(own: Mapping[str, str]) -> int:
    """The NVIDIA devices that this process may use, without loading CUDA."""
    if "CUDA_VISIBLE_DEVICES" in own:
        return len([device for device in own["CUDA_VISIBLE_DEVICES"].split(",") if device and device != "-1"])
    return sum(1 for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)) if Path("/dev").is_dir() else 0
