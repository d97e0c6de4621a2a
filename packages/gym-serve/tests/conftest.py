"""Makes the helpers beside the tests importable, whichever folder pytest was started in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from daemon_process import DaemonProcess

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon with a stand-in engine and trainer, for every test that leaves it running."""
    from daemon_process import DaemonProcess
    from model_folder import write_adapter_folder, write_model

    folder = tmp_path_factory.mktemp("daemon")
    model = write_model(folder / "tiny")
    adapter = write_adapter_folder(folder / "adapter", "tuned")
    with DaemonProcess(folder / "data", str(model), environment={"GYM_TEST_ADAPTER": str(adapter)}) as process:
        yield process.wait_ready()
