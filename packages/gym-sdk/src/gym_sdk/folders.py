"""Where Gym keeps files of its own on this machine, by the platform's custom."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """What can be made again: converted models, prepared data, logs of crashes. `GYM_CACHE_DIR` moves it."""
    return Path(os.environ.get("GYM_CACHE_DIR") or platformdirs.user_cache_dir("gym", appauthor=False))


def config_dir() -> Path:
    """The settings of the user: profiles of daemons. `GYM_CONFIG_DIR` moves it."""
    return Path(os.environ.get("GYM_CONFIG_DIR") or platformdirs.user_config_dir("gym", appauthor=False))


def data_dir() -> Path:
    """What must be kept: the daemon's store. `GYM_DATA_DIR` moves it."""
    return Path(os.environ.get("GYM_DATA_DIR") or platformdirs.user_data_dir("gym", appauthor=False))
