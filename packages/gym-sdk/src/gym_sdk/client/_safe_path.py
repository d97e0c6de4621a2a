"""Where a downloaded file may go: never outside of the folder that was asked for."""

from __future__ import annotations

import re
from pathlib import Path

from gym_sdk.client.errors import ServerFault

_PART = re.compile(r'^(?!\.{1,2}$)[^\\/:*?"<>|\x00-\x1f]{1,255}$')
"""A plain name on every platform; a colon would be a drive or a stream on Windows."""


def path_inside(folder: Path, relative: str) -> Path:
    """`folder/relative`. Raises ServerFault for a name that leads elsewhere: a daemon must not write where it likes."""
    parts = relative.split("/")
    if not all(_PART.match(part) for part in parts):
        raise ServerFault(f"the daemon names a file {relative!r}, which is no safe path", code="INTERNAL")
    return folder.joinpath(*parts)
