"""Lets test files import the helpers beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gym_data import Tokenizer

sys.path.insert(0, str(Path(__file__).parent / "families"))


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2_folder)
