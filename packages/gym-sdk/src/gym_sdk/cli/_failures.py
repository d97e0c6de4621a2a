"""What the user sees when a command fails.

Exit codes: 2 for the user's mistake, 1 for ours, 130 for Ctrl-C, 141 where the reader of standard output has gone.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from gym_sdk.errors import GymError


def report(error: BaseException, arguments: Sequence[str]) -> int:
    """Say on standard error what happened; returns the exit code."""
    if os.environ.get("GYM_TRACEBACK") == "1" and not isinstance(error, SystemExit | KeyboardInterrupt):
        traceback.print_exception(error)
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            _say(f"error: {error.code}")
            return 1
        return error.code or 0
    if isinstance(error, KeyboardInterrupt):
        _say("interrupted")
        return 130
    if isinstance(error, BrokenPipeError):
        return _broken_pipe()
    if isinstance(error, GymError):
        _say(f"error: {error}")
        return error.exit_code
    log = write_log(error, arguments)
    summary = " ".join(f"{type(error).__name__}: {error}".split())
    _say(f"error: something broke inside gym: {summary[:300]}")
    if log is not None:
        _say(f"the full traceback is in {log}")
    _say("hint: `gym doctor --report` prints what a bug report needs; GYM_TRACEBACK=1 shows the traceback here")
    return 1


def write_log(error: BaseException, arguments: Sequence[str]) -> Path | None:
    """Keep the traceback in a file; returns its path, or None where none can be written."""
    from gym_sdk.folders import cache_dir

    now = datetime.now(UTC)
    path = cache_dir() / "crashes" / f"{now:%Y%m%dT%H%M%S}-{os.getpid()}.log"
    # Only the command's name: arguments hold paths, and may hold keys.
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    text = f"gym {command}\n{now.isoformat()}\nPython {sys.version}\n\n{''.join(traceback.format_exception(error))}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError:
        return None
    return path


def _broken_pipe() -> int:
    # Python flushes standard output once more at exit; give it something that takes it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


def _say(text: str) -> None:
    try:
        sys.stderr.write(f"{text}\n")
    except OSError:
        return
